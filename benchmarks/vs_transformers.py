"""Speed against transformers: prefill, decode, time to first token; one run, paired.

    python benchmarks/vs_transformers.py [CHECKPOINT] [--dtypes float32 bfloat16] [--rounds 5]

Without a checkpoint a family's 49M-parameter random one is made. Each round runs ours and theirs
one after the other, in changing order, so that both see the same neighbours on a busy machine; a
ratio is the median over rounds of (their time / our time), and the rates are those of each side's
best round.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from engine_cases import (
    AGAIN,
    DECODE,
    PREFILL,
    Results,
    Side,
    Work,
    add_arguments,
    checkpoint,
    pipeline,
    transformers,
    work_for,
)

TARGETS = {
    "float32": {PREFILL: 1.15, DECODE[1]: 1.2, DECODE[8]: 1.2},
    "bfloat16": {PREFILL: 1.15, DECODE[1]: 1.5, DECODE[8]: 1.5},
}
OURS, THEIRS = "ours", "transformers"


def compare(path: Path, work: Work, dtype: str, arguments: argparse.Namespace) -> Results:
    results = Results()
    with pipeline(path, dtype, arguments.threads, arguments.batched_tokens) as ours:
        sides: dict[str, Side] = {OURS: ours, THEIRS: transformers(path, dtype)}
        results.measure(sides, work, arguments.rounds)
    return results


def show(dtype: str, work: Work, results: Results) -> bool:
    """Print one dtype's table; True if every target is reached."""
    print(f"\n{dtype:<20} {'ours':>12} {'transformers':>14} {'ratio':>8}   target")
    reached = True
    for row, tokens in work.tokens.items():
        target = TARGETS[dtype].get(row)
        ours, theirs = (tokens / results.best(row, side) for side in (OURS, THEIRS))
        ratio = results.ratio(row, OURS, THEIRS)
        print(
            f"{row:<20} {ours:>7.0f} tok/s {theirs:>8.0f} tok/s "
            f"{ratio:>7.2f}x   {'' if target is None else f'{target:.2f}x'}"
        )
        reached = reached and (target is None or ratio >= target)
    for row, what in ((PREFILL, "cold"), (AGAIN, "warm")):
        print(
            f"time to first token, {what}: {results.best(row, OURS) * 1000:.0f} ms, "
            f"transformers {results.best(row, THEIRS) * 1000:.0f} ms"
        )
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed against transformers, paired, in one run.")
    add_arguments(parser, list(TARGETS), rounds=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reached = True
    with checkpoint(arguments.checkpoint, arguments.family) as path:
        work = work_for(path, arguments.prompt_tokens, arguments.decode_tokens)
        for dtype in arguments.dtypes:
            reached = show(dtype, work, compare(path, work, dtype, arguments)) and reached
    print("\nevery target reached" if reached else "\na target was missed")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
