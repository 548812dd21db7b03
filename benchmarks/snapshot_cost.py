"""What state snapshots cost a cold prefill.

    python benchmarks/snapshot_cost.py [--tokens 4096] [--rounds 15] [--threads 2] [--clock wall]

Paired in one run on the 49M-parameter random checkpoint: the same engine prefills a fresh prompt
with snapshots as planned, and another with every reservation refused. Beside it the way of other
engines, which split the prefill wherever a snapshot is wanted: a prompt under a budget that ends a
slice at each of those places. The order changes from round to round. On a machine that others use
too, `--threads 1 --clock cpu` counts this process's own time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "examples")]

from checkpoint_spec import BENCHMARK_SPEC  # noqa: E402
from make_checkpoint import make_checkpoint  # noqa: E402

from vlm_serve import EngineConfig, Pipeline, SamplingParams  # noqa: E402

ONE = SamplingParams(max_tokens=1, temperature=0.0)
BLOCK = 64
WARM_UP = 2
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Refusing:
    """Makes an engine's cache refuse every snapshot while it is entered."""

    def __init__(self, pipe: Pipeline) -> None:
        self._cache = pipe.engine._cache

    def __enter__(self) -> None:
        self._cache.reserve_snapshot = lambda *_: None  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self._cache.reserve_snapshot


def seconds(pipe: Pipeline, tokens: int, seed: int, clock: Callable[[], float]) -> float:
    """Time of a cold prefill of a prompt that nobody has sent."""
    prompt = [(seed * 7919 + position * 31) % 8000 for position in range(tokens)]
    pipe.engine.flush()
    begin = clock()
    output = pipe.generate(prompt, ONE)
    assert output.usage.cached_tokens == 0
    return clock() - begin


def measure(
    pipe: Pipeline, split: Pipeline, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Times with snapshots, and split for them, each divided by the time without any."""
    clock = CLOCKS[options.clock]
    kept, cut = [], []
    for number in range(options.rounds + WARM_UP):
        taken = without = apart = 0.0
        for kind in range(3) if number % 2 else reversed(range(3)):
            seed = 3 * number + kind
            if kind == 0:
                taken = seconds(pipe, options.tokens, seed, clock)
            elif kind == 1:
                with Refusing(pipe):
                    without = seconds(pipe, options.tokens, seed, clock)
            else:
                apart = seconds(split, options.tokens, seed, clock)
        kept.append(taken / without)
        cut.append(apart / without)
    return kept[WARM_UP:], cut[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    settings = {"block_size": BLOCK, "cache_memory": "1GiB", "threads": options.threads}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(folder, BENCHMARK_SPEC)
        for dtype in ("float32", "bfloat16"):
            whole = EngineConfig(dtype=dtype, max_num_batched_tokens=8192, **settings)
            slices = EngineConfig(dtype=dtype, max_num_batched_tokens=1024 + BLOCK - 1, **settings)
            with Pipeline(checkpoint, whole) as pipe, Pipeline(checkpoint, slices) as split:
                kept, cut = measure(pipe, split, options)
                saves = sum(pipe.engine.stats()["cache"]["saves"].values())
            count = saves / (options.rounds + WARM_UP)
            cost, price = (100 * (statistics.median(ratios) - 1) for ratios in (kept, cut))
            quarters = statistics.quantiles(kept, n=4)
            low, high = (100 * (quarters[index] - 1) for index in (0, 2))
            print(
                f"{dtype}: {count:.0f} snapshots from one unsplit prefill of {options.tokens} "
                f"tokens cost {cost:+.1f} % (half of the pairs: {low:+.1f} to {high:+.1f} %); "
                f"splitting it instead {price:+.1f} % (medians of {options.rounds} pairs)",
                flush=True,
            )


if __name__ == "__main__":
    main()
