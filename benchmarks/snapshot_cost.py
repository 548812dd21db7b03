"""What state snapshots cost a cold prefill.

    python benchmarks/snapshot_cost.py [--tokens 4096] [--rounds 15]

Paired in one run on the 49M-parameter random checkpoint: the same engine prefills a fresh prompt
with snapshots as planned, and another with every reservation refused. Beside it the way of other
engines, which split the prefill wherever a snapshot is wanted: a prompt under a budget that ends a
slice at each of those places.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "examples")]

from checkpoint_spec import BENCHMARK_SPEC  # noqa: E402
from make_checkpoint import make_checkpoint  # noqa: E402

from vlm_serve import EngineConfig, Pipeline, SamplingParams  # noqa: E402

ONE = SamplingParams(max_tokens=1, temperature=0.0)
BLOCK = 64


class Refusing:
    """Makes an engine's cache refuse every snapshot while it is entered."""

    def __init__(self, pipe: Pipeline) -> None:
        self._cache = pipe.engine._cache

    def __enter__(self) -> None:
        self._cache.reserve_snapshot = lambda *_: None  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        del self._cache.reserve_snapshot


def seconds(pipe: Pipeline, tokens: int, seed: int) -> float:
    """Time of a cold prefill of a prompt that nobody has sent."""
    prompt = [(seed * 7919 + position * 31) % 8000 for position in range(tokens)]
    pipe.engine.flush()
    begin = time.perf_counter()
    output = pipe.generate(prompt, ONE)
    assert output.usage.cached_tokens == 0
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    settings = {"block_size": BLOCK, "cache_memory": "1GiB", "threads": 2}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(folder, BENCHMARK_SPEC)
        for dtype in ("float32", "bfloat16"):
            whole = EngineConfig(dtype=dtype, max_num_batched_tokens=8192, **settings)
            slices = EngineConfig(dtype=dtype, max_num_batched_tokens=1024 + BLOCK - 1, **settings)
            with Pipeline(checkpoint, whole) as pipe, Pipeline(checkpoint, slices) as split:
                kept, cut = [], []
                for round_number in range(options.rounds + 2):
                    taken = seconds(pipe, options.tokens, 3 * round_number)
                    with Refusing(pipe):
                        without = seconds(pipe, options.tokens, 3 * round_number + 1)
                    apart = seconds(split, options.tokens, 3 * round_number + 2)
                    kept.append(taken / without)
                    cut.append(apart / without)
                saves = sum(pipe.engine.stats()["cache"]["saves"].values())
            count = saves / (options.rounds + 2)
            cost, price = (100 * (statistics.median(r[2:]) - 1) for r in (kept, cut))
            print(
                f"{dtype}: {count:.0f} snapshots from one unsplit prefill of {options.tokens} "
                f"tokens cost {cost:+.1f} %; splitting it instead {price:+.1f} % "
                f"(medians of {options.rounds} pairs)"
            )


if __name__ == "__main__":
    main()
