"""Speed against transformers: prefill, decode, time to first token; one run, paired.

    python benchmarks/vs_transformers.py [CHECKPOINT] [--dtypes float32 bfloat16] [--rounds 5]

Without a checkpoint the 49M-parameter random one is made. Each round runs ours and theirs one after
the other, in changing order, so that both see the same neighbours on a busy machine; a ratio is the
median over rounds of (their time / our time), and the rates are those of each side's best round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]

import oracle  # noqa: E402
import torch  # noqa: E402
from checkpoint_spec import BENCHMARK_SPEC  # noqa: E402
from make_checkpoint import make_checkpoint  # noqa: E402

from vlm_serve import EngineConfig, Pipeline, SamplingParams  # noqa: E402

DECODE_PROMPT = 128
TARGETS = {
    "float32": {"prefill": 1.15, "decode, batch 1": 1.2, "decode, batch 8": 1.2},
    "bfloat16": {"prefill": 1.15, "decode, batch 1": 1.5, "decode, batch 8": 1.5},
}

Run = Callable[[], float]
"""Does the work once and returns the seconds that count."""


@dataclass
class Case:
    """One row of the table: what both sides do, and how many tokens that is."""

    name: str
    tokens: int
    ours: Run
    theirs: Run
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "theirs": []})

    def measure(self, ours_first: bool) -> None:
        sides = (("ours", self.ours), ("theirs", self.theirs))
        for side, run in sides if ours_first else reversed(sides):
            self.seconds[side].append(run())

    @property
    def ratio(self) -> float:
        pairs = zip(self.seconds["theirs"], self.seconds["ours"], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


class Ours:
    """The engine, driven through the public pipeline."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    def first_token(self, tokens: list[int]) -> float:
        begin = time.perf_counter()
        self._pipe.generate(tokens, greedy(1))
        return time.perf_counter() - begin

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds of `steps` decode steps: those of `steps + 1` tokens less those of one."""
        self._pipe.engine.flush()
        short = self._generate(prompts, 1)
        self._pipe.engine.flush()
        return self._generate(prompts, steps + 1) - short

    def _generate(self, prompts: list[list[int]], count: int) -> float:
        begin = time.perf_counter()
        self._pipe.generate_many(prompts, greedy(count))
        return time.perf_counter() - begin

    def cold(self, tokens: list[int]) -> float:
        self._pipe.engine.flush()
        return self.first_token(tokens)

    def warm(self, tokens: list[int]) -> float:
        self.cold(tokens)
        return self.first_token(tokens)


class Theirs:
    """transformers, driven through `generate`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def generate(self, prompts: list[list[int]], count: int) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(prompts),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=oracle.NO_TOKEN,
            )
        return time.perf_counter() - begin

    def first_token(self, tokens: list[int]) -> float:
        return self.generate([tokens], 1)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        return self.generate(prompts, steps + 1) - self.generate(prompts, 1)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def cases(ours: Ours, theirs: Theirs, prefill: int, steps: int, vocabulary: int) -> list[Case]:
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return draw.choices(range(vocabulary), k=length)

    long, batch = prompt(prefill), [prompt(DECODE_PROMPT) for _ in range(8)]
    return [
        Case("prefill", prefill, lambda: ours.cold(long), lambda: theirs.first_token(long)),
        Case(
            "decode, batch 1",
            steps,
            lambda: ours.decode(batch[:1], steps),
            lambda: theirs.decode(batch[:1], steps),
        ),
        Case(
            "decode, batch 8",
            8 * steps,
            lambda: ours.decode(batch, steps),
            lambda: theirs.decode(batch, steps),
        ),
        Case(
            "same prompt again",
            prefill,
            lambda: ours.warm(long),
            lambda: theirs.first_token(long),
        ),
    ]


@contextmanager
def checkpoint(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield make_checkpoint(folder, BENCHMARK_SPEC)


def compare(path: Path, dtype: str, arguments: argparse.Namespace) -> list[Case]:
    config = EngineConfig(
        dtype=dtype,
        block_size=64,
        threads=arguments.threads,
        cache_memory="1GiB",
        max_num_batched_tokens=arguments.batched_tokens,
    )
    with Pipeline(path, config) as pipe:
        model = oracle.model(path, getattr(torch, dtype))
        vocabulary = model.config.get_text_config().vocab_size // 2
        table = cases(
            Ours(pipe), Theirs(model), arguments.prompt_tokens, arguments.decode_tokens, vocabulary
        )
        for case in table:
            case.measure(True)
            case.seconds = {"ours": [], "theirs": []}
        for number in range(arguments.rounds):
            for case in table:
                case.measure(number % 2 == 0)
    return table


def show(dtype: str, table: list[Case]) -> bool:
    """Print one dtype's table; True if every target is reached."""
    print(f"\n{dtype:<20} {'ours':>12} {'transformers':>14} {'ratio':>8}   target")
    reached = True
    for case in table:
        target = TARGETS[dtype].get(case.name)
        ours, theirs = (min(case.seconds[side]) for side in ("ours", "theirs"))
        print(
            f"{case.name:<20} {case.tokens / ours:>7.0f} tok/s {case.tokens / theirs:>8.0f} tok/s "
            f"{case.ratio:>7.2f}x   {'' if target is None else f'{target:.2f}x'}"
        )
        reached = reached and (target is None or case.ratio >= target)
    for name in ("prefill", "same prompt again"):
        case = next(one for one in table if one.name == name)
        what = "cold" if name == "prefill" else "warm"
        print(
            f"time to first token, {what}: {min(case.seconds['ours']) * 1000:.0f} ms, "
            f"transformers {min(case.seconds['theirs']) * 1000:.0f} ms"
        )
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed against transformers, paired, in one run.")
    parser.add_argument("checkpoint", type=Path, nargs="?", help="default: a random 49M model")
    parser.add_argument("--dtypes", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--batched-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reached = True
    with checkpoint(arguments.checkpoint) as path:
        for dtype in arguments.dtypes:
            reached = show(dtype, compare(path, dtype, arguments)) and reached
    print("\nevery target reached" if reached else "\na target was missed")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
