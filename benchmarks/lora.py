"""Measure what adapters cost: decoding, prefill, and loading while others answer.

    python benchmarks/lora.py [CHECKPOINT] [--rank 16] [--rounds 7] [--dtype bfloat16]
        [--before FOLDER] [--isa avx2] [--threads N] [--processor-time]
        [--peers [--llama-source FOLDER]]

Without a checkpoint a random one of 0.15 billion parameters is made. All projections of its text
get random adapters of the rank. A ratio is the median over rounds of (time with adapters / time
without), both taken in each round by one engine, in an order that turns each round. Decoding is the
time of 65 tokens less that of one. `--before` compares requests without an adapter with those of
another checkout, whose engine runs in a child. With --processor-time the processors' time counts in
place of the clock's: for one thread on a machine that has other work. `--peers` compares decoding
at batch 1 and prefill, with the adapter on both sides, with llama.cpp, to which its own converter
gives checkpoint and adapter.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from checkpoint_spec import CheckpointSpec
from common.engine_gguf import ConversionError
from common.engine_server import Unavailable
from common.lora_peers import llama_with
from common.machine import add_isa_argument, describe, run_as
from make_checkpoint import make_checkpoint
from parity_cases import random_ids
from peft_folders import random_factors, write_adapter

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

TOKENS, PREFILL, ADAPTERS = 64, 4096, 4
SPEC = CheckpointSpec(
    vision_depth=0,
    hidden_size=1024,
    num_layers=8,
    intermediate_size=3072,
    vocab_size=8192,
    gdn_key_heads=8,
    gdn_value_heads=16,
    gdn_key_dim=64,
    gdn_value_dim=64,
    attention_heads=16,
    kv_heads=4,
    head_dim=64,
    dtype="bfloat16",
)
Names = list[str | None]
CLOCK = {"now": time.perf_counter}
"""What times are taken with."""


def greedy(count: int) -> SamplingParams:
    """Exactly `count` greedy tokens."""
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


@contextmanager
def opened(path: Path, folder: Path, given: argparse.Namespace, count: int) -> Iterator[Pipeline]:
    """An engine over the checkpoint with so many adapters, `a0` first."""
    config = EngineConfig(
        dtype=given.dtype,
        block_size=64,
        cache_memory="1GiB",
        threads=given.threads,
        speculative="off",  # Answers repeat from round to round, and would be drafted whole.
    )
    with Pipeline(path, config) as pipe:
        if count:
            from vlm_serve import LoRA

            found = pipe.engine.adapters.sizes()
            # As transformers names them, for others' converters.
            sizes = {
                f"model.{name}" if name.startswith("layers.") else name: size
                for name, size in found.items()
            }
            for seed in range(count):
                tensors = random_factors(sizes, seed, rank=given.rank)
                place = write_adapter(folder / f"a{seed}", tensors, given.rank)
                pipe.engine.adapters.load(LoRA(f"a{seed}", place))
        yield pipe


def decoding(pipe: Pipeline, names: Names) -> float:
    """Seconds of TOKENS steps of as many requests as names."""
    prompts = [random_ids(96, seed) for seed in range(len(names))]
    options = {"lora": names} if any(names) else {}
    times = []
    for count in (1, 1 + TOKENS):
        began = CLOCK["now"]()
        pipe.generate_many(prompts, greedy(count), **options)
        times.append(CLOCK["now"]() - began)
    return times[1] - times[0]


def prefill(pipe: Pipeline, names: Names) -> float:
    """Seconds of the first token behind a prompt that is not cached."""
    pipe.engine.flush()
    options = {"lora": names[0]} if any(names) else {}
    began = CLOCK["now"]()
    pipe.generate(random_ids(PREFILL, 5), greedy(1), **options)
    return CLOCK["now"]() - began


def first_tokens(pipe: Pipeline, folder: Path, *, loading: bool) -> float:
    """Median seconds to the first token of short prompts, while adapters come and go or not."""
    from vlm_serve import LoRA

    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            pipe.engine.adapters.load(LoRA("late", folder / "a0"))
            pipe.engine.adapters.unload("late")

    thread = threading.Thread(target=load)
    if loading:
        thread.start()
    times = []
    for seed in range(20):
        began = CLOCK["now"]()
        pipe.generate(random_ids(128, 1000 + seed), greedy(1), lora="a1")
        times.append(CLOCK["now"]() - began)
        pipe.engine.flush()
    stop.set()
    if loading:
        thread.join()
    return statistics.median(times)


def compare(rounds: int, plain: Callable[[], float], other: Callable[[], float]) -> list[float]:
    """The ratios other / plain of all rounds, each side first in every second one."""
    plain(), other()  # Warm up.
    ratios = []
    for index in range(rounds):
        sides = [plain, other] if index % 2 else [other, plain]
        times = {side: side() for side in sides}
        ratios.append(times[other] / times[plain])
    return ratios


def row(name: str, ratios: list[float], goal: float) -> None:
    """Print a row of the table."""
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    verdict = "yes" if middle <= goal else "NO"
    print(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {goal} | {verdict} |", flush=True)


class Child:
    """The engine of another checkout, which decodes one request whenever it is asked."""

    def __init__(self, path: Path, given: argparse.Namespace, checkout: Path) -> None:
        command = [sys.executable, __file__, str(path), "--child", "--dtype", given.dtype]
        command += ["--threads", str(given.threads)] if given.threads else []
        command += ["--processor-time"] if given.processor_time else []
        folders = [str(checkout), str(checkout / "examples"), str(checkout / "tests")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )

    def decode(self) -> float:
        """Seconds of TOKENS steps of one request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run_child(path: Path, given: argparse.Namespace) -> None:
    """Decode for every line of the input, and print the seconds."""
    with opened(path, path, given, 0) as pipe:
        for _ in sys.stdin:
            print(decoding(pipe, [None]), flush=True)


def measure(path: Path, folder: Path, given: argparse.Namespace) -> None:
    """Print the table."""
    print(describe(torch.get_num_threads()))
    print("| with adapters | ratio | all rounds | goal | reached |\n|---|---|---|---|---|")
    one: Names = ["a0"]
    four: Names = [f"a{each % ADAPTERS}" for each in range(8)]
    rounds = given.rounds
    with opened(path, folder, given, ADAPTERS) as pipe:
        if given.before is not None:
            child = Child(path, given, given.before)
            row(
                "none in the step, before this checkout",
                compare(rounds, child.decode, lambda: decoding(pipe, [None])),
                1.01,
            )
            child.close()
        for name, names, goal in (
            ("decode, batch 1, one adapter", one, 1.15),
            ("decode, batch 8, four adapters", four, 1.35),
        ):
            plain: Names = [None] * len(names)
            sides = (lambda n=plain: decoding(pipe, n)), (lambda n=names: decoding(pipe, n))
            row(name, compare(rounds, *sides), goal)
        sides = (lambda: prefill(pipe, [None])), (lambda: prefill(pipe, one))
        row(f"prefill of {PREFILL}", compare(rounds, *sides), 1.12)
        sides = (
            (lambda: first_tokens(pipe, folder, loading=False)),
            (lambda: first_tokens(pipe, folder, loading=True)),
        )
        row("first tokens while adapters are loaded", compare(rounds, *sides), 1.2)


def compare_peers(path: Path, folder: Path, given: argparse.Namespace) -> None:
    """Print the rows beside llama.cpp, or why it takes no part."""
    threads = given.threads or torch.get_num_threads()
    options = {"threads": threads, "length": PREFILL + TOKENS + 8}
    try:
        with (
            opened(path, folder, given, 1) as pipe,
            llama_with(
                folder / "a0", path, given.dtype, folder / "peer", given.llama_source, **options
            ) as peer,
        ):
            numbers = itertools.count(1000)

            def peer_decoding() -> float:
                prompt = random_ids(96, 0)
                return peer.complete([prompt], 1 + TOKENS) - peer.complete([prompt], 1)

            def peer_prefill() -> float:
                return peer.complete([random_ids(PREFILL, next(numbers))], 1)

            for name, own, theirs in (
                ("decode, batch 1", lambda: decoding(pipe, ["a0"]), peer_decoding),
                (f"prefill of {PREFILL}", lambda: prefill(pipe, ["a0"]), peer_prefill),
            ):
                row(f"{name}, beside llama.cpp", compare(given.rounds, theirs, own), 1.0)
    except (Unavailable, ConversionError) as error:
        print(f"llama.cpp takes no part: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="?", help="default: a random one")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, help="default: all processors")
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--peers", action="store_true", help="compare with llama.cpp")
    parser.add_argument("--llama-source", metavar="FOLDER", help="its tree, built")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    add_isa_argument(parser)
    given = parser.parse_args()
    if given.processor_time:
        CLOCK["now"] = time.process_time
    if given.child:
        run_child(given.checkpoint, given)
        return
    run_as(given.isa)
    with tempfile.TemporaryDirectory() as folder:
        path = given.checkpoint or make_checkpoint(Path(folder) / "model", SPEC)
        measure(path, Path(folder), given)
        if given.peers:
            compare_peers(path, Path(folder), given)


if __name__ == "__main__":
    main()
