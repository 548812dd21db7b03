"""Check that answers on a GPU keep their bits with --batch-invariant, and what that costs.

    python benchmarks/gpu_invariance.py [--requests 200] [--share 1/4] [--device cuda]
        [--compiled] [--rounds 3]

Small random checkpoints in float32 and bfloat16, dense, MoE, quantised and with attention alone,
with and without CUDA graphs. Each request is answered alone on an empty cache, then in random
batches, as a hit, preempted and in steps that fail: tokens and log-probabilities must be equal.
The last line is the time of the same answers with the option over that without it. `--compiled`
takes a CPU's compiled kernels instead. Exits with 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from checkpoint_spec import CheckpointSpec
from invariance import WAYS, compared, made_asks
from make_checkpoint import make_checkpoint

from vlm_serve import EngineConfig, Pipeline

HERE = {name: changes for name, changes in WAYS.items() if name != "drafts"}


@dataclass(frozen=True)
class Case:
    """A checkpoint and how it is run."""

    name: str
    spec: CheckpointSpec
    options: dict[str, Any] = field(default_factory=dict)


def cases() -> Iterator[Case]:
    """The kinds of products and of layers, then rounded pages and steps without graphs."""
    dense = CheckpointSpec(vision_depth=2, hidden_size=128, intermediate_size=256, head_dim=64)
    stored = replace(dense, dtype="bfloat16", vision_depth=0)
    moe = replace(stored, num_experts=8, moe_intermediate_size=128)
    yield Case("dense, float32", dense, {"dtype": "float32"})
    yield Case("dense, bfloat16", stored)
    yield Case("dense, bfloat16, no graphs", stored, {"cuda_graphs": False})
    yield Case("moe, bfloat16", moe)
    yield Case("dense, int4", stored, {"quantization": "int4"})
    yield Case("dense, int8 pages", stored, {"kv_cache_dtype": "int8"})
    yield Case("attention alone", replace(stored, full_attention_interval=1))


@dataclass(frozen=True)
class Where:
    """The device, with compiled kernels if it is a CPU and they are wanted."""

    device: str
    compiled: bool

    def config(self, case: Case, **options: Any) -> EngineConfig:
        on_cpu: dict[str, Any] = {}
        if self.device == "cpu":
            on_cpu["compiled_kernels"] = self.compiled
        return EngineConfig(
            device=self.device,
            block_size=16,
            cache_memory="64MiB",
            speculative="off",
            **on_cpu,
            **case.options,
            **options,
        )


def report(case: Case, path: Path, where: Where, count: int) -> int:
    """Print a line for each of a case's circumstances; return how many answers differ."""
    config, different = where.config(case, deterministic=True), 0
    how: dict[str, Any] = {"ways": HERE, "pictures": bool(case.spec.vision_depth)}
    for result in compared(partial(Pipeline, path), config, count, **how):
        different += result.total - result.equal
        print(f"- {case.name}: {result.name}: {result.equal} of {result.total} equal", flush=True)
    return different


def price(case: Case, path: Path, where: Where, rounds: int) -> str:
    """Return the time of answers with the option over that without, in turns: median and range."""
    asks, ratios = made_asks(24, seed=7), []
    with (
        Pipeline(path, where.config(case)) as plain,
        Pipeline(path, where.config(case, deterministic=True)) as exact,
    ):
        for turn in range(rounds + 1):
            seconds = [_seconds(pipe, asks) for pipe in (plain, exact)]
            if turn:  # The first turn warms up.
                ratios.append(seconds[1] / seconds[0])
    low, high = min(ratios), max(ratios)
    return f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f}) times the default's time"


def _seconds(pipe: Pipeline, asks: list[Any]) -> float:
    pipe.engine.flush()
    prompts, begin = [ask.content for ask in asks], time.perf_counter()
    pipe.generate_many(prompts, [ask.params for ask in asks])
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--share", default="1/1", help="k/n: every n-th case, from the k-th on")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action="store_true", help="with --device cpu")
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison of times")
    given = parser.parse_args()
    where = Where(given.device, given.compiled)
    first, step = map(int, given.share.split("/"))
    failed = 0
    for case in list(cases())[first - 1 :: step]:
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = make_checkpoint(folder, case.spec)
                failed += report(case, path, where, given.requests)
                print(f"- {case.name}: {price(case, path, where, given.rounds)}", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"- {case.name}: FAILED", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
