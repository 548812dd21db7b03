"""`vlm-serve models`: list the supported models and their features."""

from __future__ import annotations

import json

from vlm_serve.models.registry import FAMILIES, Served

_COLUMNS = ("model type", "media", "state", "experts", "compiled step", "models")


def run(*, as_json: bool) -> None:
    """Print the registry."""
    rows = {kind: _row(served) for kind, served in FAMILIES.items()}
    print(json.dumps(rows) if as_json else f"{render()}\n\n{_formats()}")


def _row(served: Served) -> dict[str, object]:
    return {
        "models": served.models,
        "media": served.media,
        "state": served.state,
        "experts": served.experts,
        "compiled_step": served.compiled,
        "quantised": served.quantised,
    }


def render() -> str:
    """Return the registry as a table."""
    rows = [_COLUMNS, *((kind, *_cells(served)) for kind, served in FAMILIES.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def _cells(served: Served) -> tuple[str, ...]:
    return (
        ", ".join(("text", *served.media)),
        "KV and snapshots" if served.state else "KV",
        "routed" if served.experts else "-",
        "yes" if served.compiled else "no",
        served.models,
    )


def _formats() -> str:
    """Return a line about the formats of weights."""
    (known,) = {served.quantised for served in FAMILIES.values()}
    return f"quantised checkpoints of all types: {', '.join(known)}"
