"""Work that the engine benchmarks measure, and the sides that run in this process."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import oracle
import torch
from checkpoint_spec import BENCHMARK_SPECS
from make_checkpoint import make_checkpoint

from vlm_serve import Pipeline, SamplingParams
from vlm_serve.system.host_threads import releasing

DECODE_PROMPT = 128
PREFILL, AGAIN = "prefill", "same prompt again"
DECODE = {1: "decode, batch 1", 8: "decode, batch 8"}


class Side(Protocol):
    """One engine under measurement."""

    def complete(self, prompts: list[list[int]], count: int) -> float:
        """Seconds for exactly `count` greedy tokens after each of the prompts, in one batch."""
        ...


class Ours:
    """The engine, driven through the public pipeline."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    def complete(self, prompts: list[list[int]], count: int) -> float:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        self._pipe.generate_many(prompts, params)
        return time.perf_counter() - begin


class Transformers:
    """transformers, driven through `generate`; it has no prefix cache."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @releasing  # Its idle workers would slow down the other sides.
    def complete(self, prompts: list[list[int]], count: int) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            ids = torch.tensor(prompts, device=self._model.device)
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=oracle.NO_TOKEN,
            )
        return time.perf_counter() - begin


@dataclass
class Work:
    """Sizes of what is measured, and the prompts: no two are alike, so that no cache can hit.

    Attributes:
        prefill: tokens of a long prompt.
        steps: tokens that are decoded.
        vocabulary: prompts are drawn from the ids below this.
        ending: what every prompt ends with: the end of the user's turn and the beginning of the
            answer, as a chat template writes them.
    """

    prefill: int
    steps: int
    vocabulary: int
    ending: list[int]
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def prompt(self, length: int) -> list[int]:
        drawn = self.draw.choices(range(self.vocabulary), k=length - len(self.ending))
        return drawn + self.ending

    @property
    def tokens(self) -> dict[str, int]:
        """How many tokens the seconds of each row stand for."""
        decode = {row: batch * self.steps for batch, row in DECODE.items()}
        return {PREFILL: self.prefill, AGAIN: self.prefill} | decode

    def parts(self) -> list[Callable[[Side], dict[str, float]]]:
        """One round: functions that run a part of it on a side and give the seconds of its rows."""
        return [self._long, *(self.decode_of(batch) for batch in DECODE)]

    def _long(self, side: Side) -> dict[str, float]:
        long = [self.prompt(self.prefill)]
        cold = side.complete(long, 1)
        # Without a cache the same prompt is as long in coming, and is not asked for.
        again = cold if isinstance(side, Transformers) else side.complete(long, 1)
        return {PREFILL: cold, AGAIN: again}

    def decode_of(self, batch: int) -> Callable[[Side], dict[str, float]]:
        """What measures decoding of so many prompts at once on a side."""

        def decode(side: Side) -> dict[str, float]:
            # The seconds of `steps + 1` tokens less those of one. What comes first also pays for
            # the room that it takes from earlier prompts, in llama.cpp more than the tokens cost.
            _, short, whole = (
                side.complete([self.prompt(DECODE_PROMPT) for _ in range(batch)], count)
                for count in (1, 1, self.steps + 1)
            )
            return {DECODE[batch]: whole - short}

        return decode


class Results:
    """Seconds of every side in every round, by row."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, list[float]]] = {}

    def measure(
        self,
        sides: Mapping[str, Side],
        work: Work,
        rounds: int,
        warm_up: int = 1,
        *,
        own_rounds: Mapping[str, range] | None = None,
        until: float = math.inf,
        tell: Callable[[int, str, dict[str, float]], None] = lambda *_: None,
    ) -> int:
        """Runs the sides one after the other, part by part, in an order that turns each round.

        The sides thereby see the same neighbours on a busy machine.

        Args:
            own_rounds: the rounds of sides that need more warm-up or take too long for all.
            until: moment of `time.monotonic` by which the last round should have ended; the first
                one is measured whatever it takes.
            tell: gets round, side and the seconds of rows as soon as they are measured. Rounds
                below 0 are warm-up.

        Returns:
            How many rounds there were time for.
        """
        names, own, longest = list(sides), own_rounds or {}, 0.0
        everyone = range(-warm_up, rounds)
        first = min(own.get(name, everyone).start for name in names)
        for number in range(first, rounds):
            begin = time.monotonic()
            if number > 0 and begin + longest > until:
                return number
            turn = number % len(names)
            for part in work.parts():
                for name in names[turn:] + names[:turn]:
                    if number in own.get(name, everyone):
                        seconds = part(sides[name])
                        tell(number, name, seconds)
                        self._keep(number, name, seconds)
            if number >= 0:
                longest = max(longest, time.monotonic() - begin)
        return rounds

    def _keep(self, number: int, name: str, seconds: Mapping[str, float]) -> None:
        if number >= 0:
            for row, value in seconds.items():
                self._seconds.setdefault(row, {}).setdefault(name, []).append(value)

    def median(self, row: str, side: str) -> float:
        return statistics.median(self._seconds[row][side])

    def ratio(self, row: str, ours: str, theirs: str) -> float:
        """The median over rounds of (their time / our time)."""
        sides = self._seconds[row]
        # A side with rounds of its own leaves out the last ones.
        pairs = zip(sides[theirs], sides[ours], strict=False)
        return statistics.median(other / own for other, own in pairs)

    def ratio_range(self, row: str, ours: str, theirs: str) -> tuple[float, float]:
        """The lowest and the highest over rounds of the same."""
        sides = self._seconds[row]
        pairs = zip(sides[theirs], sides[ours], strict=False)
        ratios = [other / own for other, own in pairs]
        return min(ratios), max(ratios)

    def share(self, part: str, whole: str, side: str) -> float:
        """The median over rounds of one row's time as a share of another's."""
        pairs = zip(self._seconds[part][side], self._seconds[whole][side], strict=True)
        return statistics.median(one / other for one, other in pairs)


@contextmanager
def checkpoint(given: Path | None, family: str = "qwen3_5") -> Iterator[Path]:
    """The given checkpoint, or a family's random one of 49M parameters, removed afterwards."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield make_checkpoint(folder, BENCHMARK_SPECS[family])


@releasing
def transformers(path: Path, dtype: str) -> Transformers:
    return Transformers(oracle.model(path, getattr(torch, dtype)))


def work_for(path: Path, prefill: int, steps: int) -> Work:
    """Prompts of ids from the lower half of the vocabulary: special tokens lie at its end."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(str(path))
    # A random checkpoint's tokenizer would spell "assistant" in bytes; Qwen's has a token for it.
    ids = oracle.tokenizer(path)("<|im_end|>\n<|im_start|>a\n").input_ids
    assert len(ids) == 5, "a token for each"
    ending = list(ids)
    return Work(prefill, steps, config.get_text_config().vocab_size // 2, ending)


def add_arguments(parser: Any, dtypes: Sequence[str], rounds: int) -> None:
    """The options that the engine benchmarks share."""
    parser.add_argument("checkpoint", type=Path, nargs="?", help="default: a random 49M model")
    parser.add_argument(
        "--family",
        choices=BENCHMARK_SPECS,
        default="qwen3_5",
        help="of the random model, where no checkpoint is given (qwen3_5)",
    )
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=list(dtypes))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--batched-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
