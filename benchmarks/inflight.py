"""Measure what askers that come at the same time compute, and how long the last of them waits.

    python benchmarks/inflight.py [CHECKPOINT] [--askers 2 8 32] [--rounds 5] [--document 8192]
        [--cases picture ...] [--no-goals]

Askers share a picture, a document, or a recording that grows from asker to asker, and then ask
something of their own; "two depths" adds a part that only half of them share. They run with a seat
(`max_num_seqs`) for each, and for a quarter of them. Three ways take turns on one engine, flushed
before each:

- at once: all are sent, in order.
- one by one: each after the end of the one before it.
- in stages: the first asker of every common part after the one before it, then all others at once.
  That is a leader plus the tails, and what a client could do that knows what is common.

Tokens computed are those of the prompts less the cached ones: at once at most 1.05 of one by one.
The time to the last first token at once is at most 1.1 of that in stages (median over rounds of the
ratio). Exits with 1 if a goal is missed. Without a checkpoint a random one is made.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import numpy as np
import torch
from checkpoint_spec import CheckpointSpec
from common.machine import describe
from make_checkpoint import make_checkpoint
from parity_cases import random_ids, user

from vlm_serve import EngineConfig, SamplingParams
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.preprocess.identity.prompt import Prompt

MOST_TOKENS, MOST_TIME = 1.05, 1.1
BRANCH, QUESTION = 384, 24
"""Tokens of a part that half of the askers share, and of what each asks."""
FRAMES = 16
"""By which a recording grows; it begins with four times as many."""
SPEC = CheckpointSpec(hidden_size=256, num_layers=8, intermediate_size=512, seed=4)
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
WORDS = ("red", "stars", "below", "a", "circle", "7", "near", "the")


@dataclass(frozen=True)
class Asker:
    """A prompt, and the stage in which a client sends it that knows what is common."""

    prompt: Prompt
    stage: int


@dataclass(frozen=True)
class Run:
    """Prompt tokens that were computed, and seconds to the last first token."""

    computed: int
    seconds: float
    joined: int = 0


def some_text(seed: int, count: int) -> str:
    return " ".join(WORDS[index % len(WORDS)] for index in random_ids(count, seed))


def parts_of(askers: int, *, forks: bool) -> list[tuple[str, int]]:
    """Of each asker: its text behind what all share, and its stage."""
    found = []
    for index in range(askers):
        branch = index % 2 if forks else 0
        first = index == branch
        text = some_text(100 + branch, BRANCH) + "\n" if forks else ""
        question = f"{index}: {some_text(1000 + index, QUESTION)}"
        found.append((text + question, branch if first else 2))
    return found


def pictures(engine: Engine, askers: int, forks: bool, _: int) -> list[Asker]:
    noise = np.random.default_rng(1).integers(0, 256, (448, 448, 3), dtype=np.uint8)
    part = {"type": "image", "image": noise}
    return [
        Asker(engine.preprocessor.prepare([user(part, text)]), stage)
        for text, stage in parts_of(askers, forks=forks)
    ]


def documents(engine: Engine, askers: int, forks: bool, length: int) -> list[Asker]:
    shared = random_ids(length, 2)
    found = []
    for index in range(askers):
        branch = index % 2 if forks else 0
        own = random_ids(BRANCH, 100 + branch) if forks else []
        ids = [*shared, *own, *random_ids(QUESTION, 1000 + index)]
        stage = branch if index == branch else 2
        found.append(Asker(engine.preprocessor.prepare_tokens(ids), stage))
    return found


def recordings(engine: Engine, askers: int, forks: bool, _: int) -> list[Asker]:
    """Two lengths of a recording, or four; the shorter ones are asked about first."""
    lengths = 4 if forks else 2
    shape = (FRAMES * (3 + lengths), 128, 192, 3)
    noise = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
    found = []
    for index in range(askers):
        length = index * lengths // askers
        frames = noise[: FRAMES * (4 + length)]
        part = {"type": "video", "video": frames, "fps": 2.0, "sampling": "fps_grid"}
        question = f"{index}: {some_text(1000 + index, QUESTION)}"
        first = index == -(-length * askers // lengths)
        prompt = engine.preprocessor.prepare([user(part, question)])
        found.append(Asker(prompt, length if first else lengths))
    return found


CASES: dict[str, Callable[[Engine, int, bool, int], list[Asker]]] = {
    "picture": pictures,
    "document": documents,
    "recording": recordings,
}


class Answers:
    """Sends prompts and collects when their first tokens came and what they computed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.computed = self.joined = 0

    def send(self, prompts: Sequence[Prompt]) -> None:
        """Send all of them at once; return when all are answered."""
        ended = threading.Semaphore(0)

        def receive(delta: Delta) -> None:
            assert delta.error is None and delta.cache_report is not None
            report = delta.cache_report
            self.computed += report.prompt_tokens - report.boundary
            self.joined += report.joined_tokens
            ended.release()

        for prompt in prompts:
            self._engine.submit(prompt, PARAMS, receive)
        for _ in prompts:
            ended.acquire()


def run(engine: Engine, groups: Sequence[Sequence[Prompt]]) -> Run:
    """Send the groups one after the other to an empty cache."""
    engine.flush()
    answers = Answers(engine)
    begin = time.perf_counter()
    for group in groups:
        answers.send(group)
    return Run(answers.computed, time.perf_counter() - begin, answers.joined)


def compare(engine: Engine, askers: Sequence[Asker], rounds: int) -> tuple[float, float, Run]:
    """Ratios of tokens and of times, and the last run at once."""
    prompts = [asker.prompt for asker in askers]
    stages = sorted({asker.stage for asker in askers})
    staged = [[each.prompt for each in askers if each.stage == stage] for stage in stages]
    ways = {"once": [prompts], "single": [[each] for each in prompts], "staged": staged}
    tokens, times, last = list[float](), list[float](), Run(0, 0.0)
    for number in range(rounds + 1):
        order = list(ways) if number % 2 else list(reversed(ways))
        results = {way: run(engine, ways[way]) for way in order}
        last = results["once"]
        if number:  # the first round warms up
            tokens.append(last.computed / results["single"].computed)
            times.append(last.seconds / results["staged"].seconds)
    engine.check()
    return max(tokens), statistics.median(times), last


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", help="default: a random one")
    parser.add_argument("--askers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--document", type=int, default=8192, help="tokens")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--no-goals", action="store_true", help="exit with 0 in any case")
    options = parser.parse_args()
    print(describe(torch.get_num_threads()))
    print("| askers, seats | of | forks | computed | joined | tokens: ratio | last token: ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        path = options.checkpoint or make_checkpoint(Path(folder) / "checkpoint", SPEC)
        for askers in options.askers:
            for seats in sorted({askers, max(1, askers // 4)}, reverse=True):
                config = EngineConfig(
                    cache_memory="1GiB",
                    max_num_seqs=seats,
                    max_model_len=options.document + 2048,
                    speculative="off",
                )
                engine = Engine.from_checkpoint(str(path), config)
                for case in options.cases:
                    for forks in (False, True):
                        made = CASES[case](engine, askers, forks, options.document)
                        tokens, times, last = compare(engine, made, options.rounds)
                        missed += tokens > MOST_TOKENS or times > MOST_TIME
                        cells = f"{askers}, {seats} | {case} | {'two depths' if forks else 'one'}"
                        cells += f" | {last.computed} | {last.joined}"
                        print(f"| {cells} | {tokens:.3f} | {times:.2f} |", flush=True)
                engine.close()
    print("all goals were reached" if not missed else f"{missed} rows miss a goal")
    return 1 if missed and not options.no_goals else 0


if __name__ == "__main__":
    sys.exit(main())
