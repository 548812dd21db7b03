"""Measure an endpoint as its client sees it, beside a peer if one is named.

    python benchmarks/endpoints.py demo                         # a server of its own, which it ends
    python benchmarks/endpoints.py checkpoint/ --cache-memory 4GiB          # options as for `serve`
    python benchmarks/endpoints.py --base-url http://127.0.0.1:8000 [--peer http://127.0.0.1:8080]

Any server with OpenAI's `/v1/chat/completions` will do. docs/bench.md tells what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import common  # noqa: F401  # First: it adds tests/ to the path.
from common.endpoint import ROWS, EndpointError, Plan, Ratio, Sample, Side, measure, ratio
from server_process import server_process

MISSING = "-"
RATES = ("prefill", "decode")
"""Rows that are tokens per second where the endpoint counts tokens."""


def report(sides: Sequence[Side], plan: Plan, words: int) -> dict[str, Any]:
    """Return all samples, ratios and notes as JSON.

    Args:
        sides: the first one and, if there is one, its peer.
        words: in a text prompt.
    """
    ratios = {row: ratio(sides[0], sides[-1], row) for row in ROWS} if len(sides) > 1 else {}
    return {
        "plan": asdict(plan) | {"words": words},
        "rounds": len(sides[0].samples["prefill"]),
        "endpoints": [
            {
                "url": side.url,
                "model": side.model,
                "samples": {
                    row: [asdict(each) if each else None for each in samples]
                    for row, samples in side.samples.items()
                },
                "refused": side.refused,
                "fields_left_out": side.without,
            }
            for side in sides
        ],
        "ratios": {row: asdict(found) if found else None for row, found in ratios.items()},
        "notes": list(notes(sides)),
    }


def table(sides: Sequence[Side]) -> str:
    """Return the result for a terminal: a row for each question, a column for each side."""
    heads = ["", *(f"{side.model} at {side.url}" for side in sides)]
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
        whole = [each for row in ROWS[:2] if (each := side.typical(row))]
        if any(each.cached is None for each in whole):
            yield f"{side.url} does not report cached tokens"
        if any(each.tokens is None for each in whole):
            yield f"{side.url} does not report tokens, so it has no rates"
        if side.without:
            yield f"{side.url} was asked without {', '.join(side.without)}, which it refuses"
        for row, message in side.refused.items():
            yield f"{row} is missing: {message}"


def _cell(row: str, sample: Sample | None) -> str:
    if sample is None:
        return MISSING
    parts = []
    if row in RATES and sample.tokens:
        rate = sample.tokens / sample.seconds
        parts.append(f"{rate:.0f} tok/s" if rate >= 100 else f"{rate:.3g} tok/s")
    if row != "decode" or not parts:
        seconds = sample.seconds
        parts.append(f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms")
    if row != "decode" and sample.cached is not None and sample.tokens is not None:
        parts.append(f"{sample.cached} of {sample.tokens} cached")
    return ", ".join(parts)


def _shown(found: Ratio | None) -> str:
    return f"{found.median:.3g} ({found.low:.3g} to {found.high:.3g})" if found else MISSING


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="to serve, or the name to ask --base-url for")
    parser.add_argument("--base-url", metavar="URL", help="an endpoint that runs already")
    parser.add_argument("--api-key", metavar="KEY", help="of the endpoint")
    parser.add_argument("--peer", metavar="URL", help="another endpoint, asked in turns")
    parser.add_argument("--peer-model", default="", metavar="NAME", help="default: its first")
    parser.add_argument("--peer-api-key", metavar="KEY")
    parser.add_argument("--prompt-tokens", type=int, default=2048, metavar="N")
    parser.add_argument("--answer-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="at most")
    parser.add_argument("--seconds", type=int, default=60, metavar="N", help="no round begins then")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    given, flags = parser.parse_known_args()
    if given.base_url is not None and flags:
        parser.error(f"{flags[0]} has no effect on the endpoint of --base-url")
    plan = Plan(
        given.prompt_tokens,
        given.answer_tokens,
        given.rounds,
        given.seconds,
        secrets.randbits(32),
    )
    with contextlib.ExitStack() as stack:
        url, model = given.base_url, given.model or ""
        if url is None:
            arguments = (model or "demo", "--no-page", "--no-access-log", *flags)
            server = stack.enter_context(server_process(*arguments, log=sys.stderr))
            url, model = server.url, ""
        sides = [Side(url, model, given.api_key)]
        if given.peer is not None:
            sides.append(Side(given.peer, given.peer_model, given.peer_api_key))
        for side in sides:
            stack.enter_context(side.client)
        try:
            words = measure(sides, plan)
        except EndpointError as error:
            sys.exit(str(error))
    print(json.dumps(report(sides, plan, words), indent=2) if given.json else table(sides))


if __name__ == "__main__":
    main()
