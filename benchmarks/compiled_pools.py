"""Compiled steps over rounded pages and states beside the ops of torch, paired in one run.

    python benchmarks/compiled_pools.py [--rounds 7] [--threads 2] [--minutes 2] [--isa avx2]

The benchmarks' 49M-parameter model: decode steps of one and of eight sequences of 2 048 tokens, and
a prompt of 512. Both sides have pools of the same types and take turns; a ratio is the median over
rounds of (torch / compiled), times are medians. Rows that there is no time for are left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from engine_cases import checkpoint  # First: it says where the tests' modules are.
from machine import add_isa_argument, describe, run_as
from model_driver import Driver, text_sequence

from vlm_serve.models import load_model
from vlm_serve.models.model import Model

BLOCK, CONTEXT, PROMPT = 64, 2048, 512
POOLS: dict[str, tuple[torch.dtype | None, torch.dtype]] = {
    "plain": (None, torch.float32),
    "int8 pages": (torch.uint8, torch.float32),
    "fp8 pages": (torch.float8_e4m3fn, torch.float32),
    "bfloat16 states": (None, torch.bfloat16),
}


class Side:
    """A model and its pools, whose content is small numbers."""

    def __init__(self, model: Model, pools: str) -> None:
        kv, state = POOLS[pools]
        blocks = 8 * CONTEXT // BLOCK + 16
        self._driver = Driver(
            model, block_size=BLOCK, num_blocks=blocks, num_rows=16, kv=kv, state=state
        )
        for pool in self._driver.caches.tensors.values():
            pool.view(torch.uint8).zero_()
        if model.compiled:
            model.compile_steps(self._driver.caches)
        self._sequences = [text_sequence([1] * CONTEXT) for _ in range(8)]
        for sequence in self._sequences:
            sequence.started = True

    def decode(self, batch: int) -> None:
        self._driver.step(self._sequences[:batch])

    def prefill(self) -> None:
        one = self._sequences[-1]
        self._driver.step(prefills=[(one, CONTEXT - PROMPT, CONTEXT)], all_logits=False)


CASES: dict[str, Callable[[Side], None]] = {
    "decode, batch 1": lambda side: side.decode(1),
    "decode, batch 8": lambda side: side.decode(8),
    f"prefill of {PROMPT}": Side.prefill,
}


def rows(path: Path, dtype: torch.dtype, rounds: int, until: float) -> None:
    models = [load_model(path, dtype, "cpu", compiled=compiled) for compiled in (True, False)]
    for pools in POOLS:
        sides = [Side(model, pools) for model in models]
        for name, run in CASES.items():
            if time.monotonic() > until:
                print("cut for time", flush=True)
                return
            times: list[list[float]] = [[], []]
            for turn in range(-1, rounds):
                for which in (0, 1) if turn % 2 else (1, 0):
                    begin = time.perf_counter()
                    run(sides[which])
                    if turn >= 0:
                        times[which].append(1e3 * (time.perf_counter() - begin))
            ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
            ours, theirs = map(statistics.median, times)
            kind = str(dtype).removeprefix("torch.")
            print(
                f"| {kind} | {pools} | {name} | {ours:.2f} | {theirs:.2f} | {ratio:.2f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiled steps over rounded pools.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=2)
    add_isa_argument(parser)
    arguments = parser.parse_args()
    run_as(arguments.isa)
    torch.set_num_threads(arguments.threads)
    until = time.monotonic() + 60 * arguments.minutes
    print(describe(arguments.threads))
    print("| | pools | step | compiled, ms | torch, ms | torch / compiled |\n" + "|---" * 6 + "|")
    with checkpoint(None) as path, torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            rows(path, dtype, arguments.rounds, until)


if __name__ == "__main__":
    sys.exit(main())
