"""Compare two ranks of one thread each with one rank of two threads: prefill and decode.

    python benchmarks/tensor_parallel.py [checkpoint] [--ranks 2] [--rounds 7] [--dtype bfloat16]
        [--prefill 4096] [--isa avx2]

Both engines have the same random weights (about 330M parameters unless a checkpoint is named) and
processes of their own, which measure in turns while the other one sleeps: the printed ratios are of
neighbours. Exits with 1 where the greedy answers differ in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from checkpoint_spec import LARGER_SPEC
from common.machine import add_isa_argument, describe, run_as
from make_checkpoint import make_checkpoint
from parity_cases import random_ids

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.system.host_threads import release_worker_threads

BATCH, ANSWER = 8, 33
DUE = {"prefill": 1.15, "decode": 1.35}
"""Most time that ranks may take beside one."""


class Side:
    """One engine in a child process."""

    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told = self.ask("ready")

    def ask(self, kind: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(kind, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "a side has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def child(path: str, ranks: int, dtype: str, prefill: int) -> None:
    """Answers every line of its input with the seconds that it took."""
    config = EngineConfig(
        dtype=dtype,
        tensor_parallel_size=ranks,
        threads=max(1, torch.get_num_threads() // ranks),
        block_size=64,
        cache_memory="1GiB",
        enable_prefix_caching=False,
        max_num_seqs=BATCH,
    )
    with Pipeline(path, config) as pipe:
        for number, line in enumerate(sys.stdin):
            release_worker_threads()
            answer = {
                "ready": lambda: {"compiled": pipe.engine.config.compiled_kernels},
                "prefill": lambda n=number: _prefill(pipe, prefill, n),
                "decode": lambda: _decode(pipe),
            }[line.strip()]()
            print(json.dumps(answer), flush=True)


def _prefill(pipe: Pipeline, length: int, seed: int) -> dict[str, Any]:
    begin = time.perf_counter()
    pipe.generate(random_ids(length, seed, 30_000), SamplingParams(temperature=0.0, max_tokens=1))
    return {"seconds": time.perf_counter() - begin}


def _decode(pipe: Pipeline) -> dict[str, Any]:
    """From the first token of the last sequence on."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=ANSWER)
    tokens: list[list[int]] = [[] for _ in range(BATCH)]
    done, started, begin = threading.Semaphore(0), [0], [0.0]

    def listen(index: int, delta: Delta) -> None:
        started[0] += not tokens[index]
        tokens[index] += delta.token_ids
        if started[0] == BATCH and not begin[0]:
            begin[0] = time.perf_counter()
        if delta.finish_reason is not None:
            done.release()

    for index in range(BATCH):
        prompt = pipe.engine.preprocessor.prepare_tokens(random_ids(64, index, 30_000))
        pipe.engine.submit(prompt, params, lambda delta, i=index: listen(i, delta))
    for _ in range(BATCH):
        done.acquire()
    return {"seconds": time.perf_counter() - begin[0], "tokens": tokens}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prefill", type=int, default=4096)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    add_isa_argument(parser)
    given = parser.parse_args()
    run_as(given.isa)
    if given.child is not None:
        child(given.checkpoint, given.child, given.dtype, given.prefill)
        return 0
    print(describe(torch.get_num_threads()))
    with tempfile.TemporaryDirectory() as folder:
        path = given.checkpoint or str(make_checkpoint(Path(folder), LARGER_SPEC))
        return compare(path, given)


def compare(path: str, given: argparse.Namespace) -> int:
    """Prints the rows; 1 if greedy answers in float32 differ."""
    options = ["--dtype", given.dtype, "--prefill", str(given.prefill), "--child"]
    sides = [Side([path, *options, str(ranks)]) for ranks in (1, given.ranks)]
    try:
        answers = [side.ask("decode")["tokens"] for side in sides]
        same = answers[0] == answers[1]
        print(f"weights {given.dtype}; greedy answers {'equal' if same else 'differ'}")
        print(f"| | 1 rank | {given.ranks} ranks | time of ranks / of one, median (range) | due |")
        print("|---|---|---|---|---|", flush=True)
        for kind, tokens in (("prefill", given.prefill), ("decode", BATCH * (ANSWER - 1))):
            times = [[side.ask(kind)["seconds"] for side in sides] for _ in range(given.rounds)]
            ratios = sorted(two / one for one, two in times)
            speeds = [tokens / statistics.median(column) for column in zip(*times, strict=True)]
            middle = statistics.median(ratios)
            print(
                f"| {kind}, tokens/s | {speeds[0]:.0f} | {speeds[1]:.0f} "
                f"| {middle:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | {DUE[kind]} |",
                flush=True,
            )
    finally:
        for side in sides:
            side.close()
    return 0 if same or given.dtype != "float32" else 1


if __name__ == "__main__":
    sys.exit(main())
