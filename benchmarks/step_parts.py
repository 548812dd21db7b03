"""Where the time of a decode step goes, here and in an earlier checkout, in turns.

    python benchmarks/step_parts.py CHECKPOINT [--before FOLDER] [--dtype bfloat16]
        [--quantization int8] [--batch 1] [--prompt-tokens 128] [--tokens 100] [--rounds 10]
        [--threads 2]

Each side is a process of its own whose functions below are timed where they stand; the figures are
medians over rounds of the median step, in microseconds. A part contains those that it calls: `step`
all but what lies between two steps, `run` the executor's share, `forward` the model's, `compiled`
the call of compiled code.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from engine_child import own_environment
from machine import ROOT, commit, describe

PARTS = {
    "step": "vlm_serve.engine.loop:EngineLoop._step",
    "plan": "vlm_serve.engine.scheduler:Scheduler.plan",
    "commit": "vlm_serve.engine.scheduler:Scheduler.commit",
    "run": "vlm_serve.engine.local_executor:LocalExecutor.run",
    "batch": "vlm_serve.engine.local_executor:make_batch",
    "sample": "vlm_serve.engine.local_executor:sample",
    "forward": "vlm_serve.models.model:Model.forward",
    "compiled": "vlm_serve.models.compiled_step:call",
}


def timed(place: str, times: list[float]) -> None:
    """Has a function note the seconds that it takes."""
    module, _, path = place.partition(":")
    owner: Any = __import__(module, fromlist=["*"])
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def measured(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args, **options)
        times.append(time.perf_counter() - begin)
        return result

    setattr(owner, name, measured)


def serve(checkpoint: str, dtype: str, quantization: str | None, threads: int) -> None:
    """The child's side: answers every (prompts, tokens) with the median seconds of each part."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vlm_serve import EngineConfig, Pipeline, SamplingParams

    times: dict[str, list[float]] = {name: [] for name in PARTS}
    for name, place in PARTS.items():
        timed(place, times[name])
    config = EngineConfig(
        dtype=dtype,
        quantization=quantization,
        block_size=64,
        threads=threads,
        cache_memory="1GiB",
    )
    with Pipeline(checkpoint, config) as pipe:
        print(json.dumps(pipe.engine.spec.vocab_size), file=answers, flush=True)
        for line in sys.stdin:
            prompts, count = json.loads(line)
            for each in times.values():
                each.clear()
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            pipe.generate_many(prompts, params)
            medians = {name: statistics.median(each) for name, each in times.items()}
            print(json.dumps(medians), file=answers, flush=True)


@contextmanager
def side(folder: Path, options: argparse.Namespace) -> Iterator[Callable[[Any], Any]]:
    """A checkout's engine: a function that asks it, whose first answer is the vocabulary."""
    arguments = [options.checkpoint, "--dtype", options.dtype, "--threads", str(options.threads)]
    if options.quantization:
        arguments += ["--quantization", options.quantization]
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments, "--serve"],
        env=own_environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(question: Any) -> Any:
        assert process.stdin is not None and process.stdout is not None
        if question is not None:
            print(json.dumps(question), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    try:
        yield ask
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int6", "int4"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=100, help="that are decoded behind each")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.checkpoint, options.dtype, options.quantization, options.threads)
    folders = [ROOT] + ([options.before.resolve()] if options.before else [])
    names = ["now", *(f"commit {commit(folder)}" for folder in folders[1:])]
    print(describe(options.threads), flush=True)
    draw = random.Random(0)
    rounds: list[list[dict[str, float]]] = [[] for _ in folders]
    with ExitStack() as stack:
        asks = [stack.enter_context(side(folder, options)) for folder in folders]
        vocabulary = min(ask(None) for ask in asks) // 2
        for number in range(-1, options.rounds):
            for index in range(len(asks)):
                turn = (number + index) % len(asks)
                prompts = [
                    draw.choices(range(vocabulary), k=options.prompt_tokens)
                    for _ in range(options.batch)
                ]
                medians = asks[turn]([prompts, options.tokens])
                if number >= 0:
                    rounds[turn].append(medians)
    print(f"| batch {options.batch}, {options.dtype}, us | {' | '.join(names)} | ratio |")
    print("|---" * (2 + len(names)) + "|")
    for name in PARTS:
        columns = [[medians[name] for medians in own] for own in rounds]
        ratio = statistics.median(
            last / first for first, last in zip(columns[0], columns[-1], strict=True)
        )
        cells = " | ".join(f"{1e6 * statistics.median(column):.0f}" for column in columns)
        print(f"| {name} | {cells} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
