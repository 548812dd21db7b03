"""The result as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from vlm_serve.bench.measuring import RATES, ROWS, Plan, Ratio, Sample, Side, ratio

MISSING = "-"


def report(sides: Sequence[Side], plan: Plan, words: int) -> dict[str, Any]:
    """Return all samples, ratios and notes as JSON.

    Args:
        sides: the first one and, if there is one, its peer.
        plan: what was asked for.
        words: in a text prompt.
    """
    return {
        "plan": asdict(plan) | {"words": words},
        "rounds": len(sides[0].samples["prefill"]),
        "endpoints": [
            {
                "url": side.endpoint.url,
                "model": side.endpoint.model,
                "samples": {
                    row: [asdict(each) if each else None for each in samples]
                    for row, samples in side.samples.items()
                },
                "refused": side.refusals,
                "fields_left_out": side.endpoint.without,
            }
            for side in sides
        ],
        "ratios": {
            row: asdict(found) if (found := ratio(sides[0], sides[1], row)) else None
            for row in ROWS
        }
        if len(sides) > 1
        else {},
        "notes": list(notes(sides)),
    }


def table(sides: Sequence[Side]) -> str:
    """Return the result for a terminal: a row for each question, a column for each side."""
    heads = ["", *(f"{side.endpoint.model} at {side.endpoint.url}" for side in sides)]
    rows = [[row, *(_cell(row, side.typical(row)) for side in sides)] for row in ROWS]
    if len(sides) > 1:
        heads.append("ratio")
        for row in rows:
            row.append(_shown(ratio(sides[0], sides[1], row[0])))
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *rows)
    ]
    return "\n".join([*lines, "", *notes(sides)])


def notes(sides: Sequence[Side]) -> Iterator[str]:
    """Yield what a reader must know to read the numbers, one sentence each."""
    rounds = len(sides[0].samples["prefill"])
    of = f"medians of {rounds} rounds" if rounds > 1 else "one round"
    yield f"{of}, measured by a client"
    if len(sides) > 1:
        yield (
            "ratio: the peer's time for the same request over the first endpoint's, median of the "
            "rounds and range; above 1 the first one is faster"
        )
    for side in sides:
        name = side.endpoint.url
        whole = [side.typical(row) for row in ("prefill", "same prompt again")]
        if any(each is not None and each.cached is None for each in whole):
            yield f"{name} does not report cached tokens"
        if any(each is not None and each.tokens is None for each in whole):
            yield f"{name} does not report tokens, so it has no rates"
        if side.endpoint.without:
            left = ", ".join(side.endpoint.without)
            yield f"{name} was asked without {left}, which it refuses"
        for row, message in side.refusals.items():
            yield f"{row} is missing: {message}"


def _cell(row: str, sample: Sample | None) -> str:
    if sample is None:
        return MISSING
    parts = []
    if row in RATES and sample.tokens:
        parts.append(f"{_rounded(sample.tokens / sample.seconds)} tok/s")
    if row != "decode" or not parts:
        parts.append(_time(sample.seconds))
    if row != "decode" and sample.cached is not None and sample.tokens is not None:
        parts.append(f"{sample.cached} of {sample.tokens} cached")
    return ", ".join(parts)


def _shown(found: Ratio | None) -> str:
    if found is None:
        return MISSING
    return f"{found.median:.3g} ({found.low:.3g} to {found.high:.3g})"


def _rounded(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
