"""How long a GPU waits for the host between two decode steps, with and without steps ahead.

    python benchmarks/gpu_ahead.py [--sequences 1 8 64 256] [--tokens 64] [--device cpu]

Both sides take turns in one process, on a random model of the 4B's size. A step's time on the
device lies between two events of its stream: one before its launches are queued, one behind them.
The rest of the time between two steps is idle: it is what the host takes while nothing is queued.
`--device cpu` goes through the script with a tiny model; a CPU runs one step at a time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from checkpoint_spec import CheckpointSpec
from engine_gpu import QWEN_4B
from make_checkpoint import make_checkpoint
from parity import executor_of

from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.engine.requests.plan import StepOutput, StepPlan
from vlm_serve.engine.steps.local_executor import LocalExecutor

PROMPT = 256
TINY = CheckpointSpec(num_layers=2, full_attention_interval=2, vision_depth=0)


class Timed:
    """Marks the begin and the end of each step of rows on the device.

    Args:
        executor: runs the steps.
    """

    def __init__(self, executor: LocalExecutor) -> None:
        self._executor = executor
        self._begin: Callable[[StepPlan], Callable[[], StepOutput]] = executor._begin
        self._on_gpu = executor._caches.device.type == "cuda"
        self.marks: list[tuple[Any, Any]] = []

    def __call__(self, plan: StepPlan) -> Callable[[], StepOutput]:
        first = self._mark()
        read = self._begin(plan)
        if plan.rows is not None:
            self.marks.append((first, self._mark()))
        return read

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def milliseconds(self) -> tuple[float, float]:
        """Return the median time of a step on the device, and of the wait behind it."""
        if self._on_gpu:
            torch.cuda.synchronize()
        busy = [self._between(first, last) for first, last in self.marks]
        ends = zip(self.marks, self.marks[1:], strict=False)
        idle = [self._between(before[1], after[0]) for before, after in ends]
        self.marks = []
        return statistics.median(busy), statistics.median(idle)

    def _between(self, first: Any, last: Any) -> float:
        if self._on_gpu:
            return float(first.elapsed_time(last))
        return 1000 * float(last - first)


@contextmanager
def timed(pipe: Pipeline) -> Iterator[Timed]:
    """Time an engine's steps inside the block."""
    executor = executor_of(pipe.engine)
    watch = Timed(executor)
    executor._begin = watch  # type: ignore[method-assign]
    yield watch


def decode(pipe: Pipeline, sequences: int, tokens: int) -> None:
    """Answer so many prompts at once."""
    draw = random.Random(sequences)
    prompts = [draw.choices(range(5, 400), k=PROMPT) for _ in range(sequences)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    pipe.generate_many(prompts, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    on_gpu = given.device != "cpu"
    if on_gpu and not torch.cuda.is_available():
        print("No GPU found: nothing was measured.")
        return
    spec = replace(QWEN_4B, vocab_size=248_320) if on_gpu else TINY
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder), spec)
        config = EngineConfig(
            device=given.device, max_num_seqs=max(given.sequences), speculative="off"
        )
        print("| sequences | step, ms | idle behind it, ms | idle without steps ahead, ms |")
        print("|---|---|---|---|")
        with Pipeline(checkpoint, config) as pipe, timed(pipe) as watch:
            executor = executor_of(pipe.engine)
            for sequences in given.sequences:
                found = []
                for ahead in (executor.steps_ahead, 0):
                    before, executor.steps_ahead = executor.steps_ahead, ahead
                    decode(pipe, sequences, given.tokens)
                    found.append(watch.milliseconds())
                    executor.steps_ahead = before
                (busy, idle), (_, alone) = found
                print(f"| {sequences} | {busy:.2f} | {idle:.2f} | {alone:.2f} |", flush=True)


if __name__ == "__main__":
    main()
