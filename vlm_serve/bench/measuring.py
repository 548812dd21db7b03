"""Asks one or two endpoints in turns, and keeps what each took."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from vlm_serve.bench import questions
from vlm_serve.bench.endpoint import Answer, Endpoint, EndpointError

ROWS = ("prefill", "same prompt again", "decode", "picture", "same picture again")
RATES = ("prefill", "decode")
"""Rows that are tokens per second where the endpoint counts tokens."""
TRIAL_WORDS = 200
SPARE_TOKENS = 128
"""Left free of the context beside prompt and answer, for the chat template."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked.

    Attributes:
        prompt_tokens: about as many in a text prompt, as the first endpoint counts.
        answer_tokens: of the answers that show the pace of decoding.
        rounds: at most; the first one is always completed.
        seconds: no round begins after this time.
        seed: of words and pictures.
    """

    prompt_tokens: int
    answer_tokens: int
    rounds: int
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request.

    Attributes:
        seconds: until the answer's end; it has one token, but many in the row "decode".
        tokens: of the prompt, in the row "decode" of the answer; None if they are not reported.
        cached: tokens of the prompt that the endpoint reports as reused; None if it does not.
        cost: compared between endpoints: seconds, or seconds per token of a long answer; None if
            there is nothing to compare.
    """

    seconds: float
    tokens: int | None
    cached: int | None
    cost: float | None


@dataclass
class Side:
    """One endpoint and its samples by row, one a round; None: the row was refused."""

    endpoint: Endpoint
    samples: dict[str, list[Sample | None]] = field(
        default_factory=lambda: {name: [] for name in ROWS}
    )
    refusals: dict[str, str] = field(default_factory=dict)

    def typical(self, row: str) -> Sample | None:
        """Return the sample of median time; None without any."""
        found = sorted((each for each in self.samples[row] if each), key=lambda each: each.seconds)
        return found[len(found) // 2] if found else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """A peer's cost over the first endpoint's, round by round."""

    median: float
    low: float
    high: float


def measure(sides: Sequence[Side], plan: Plan) -> int:
    """Ask every side in every round, in changing order; return the number of words in a prompt.

    Raises:
        EndpointError: an endpoint does not answer a text at all.
    """
    chosen = random.Random(plan.seed)
    deadline = time.monotonic() + plan.seconds
    lengths = [length for each in sides if (length := each.endpoint.look()) is not None]
    words = _warm_up(sides, plan, chosen, min(lengths, default=None))
    for number in range(plan.rounds):
        if number and time.monotonic() > deadline:
            break
        body = chosen.getrandbits(32)
        for side in sides if number % 2 == 0 else reversed(sides):
            _round(side, plan, words, body, chosen.getrandbits(32))
    return words


def ratio(first: Side, peer: Side, row: str) -> Ratio | None:
    """Compare a row of two sides that were asked in the same rounds; None without any pair."""
    pairs = zip(first.samples[row], peer.samples[row], strict=True)
    found = [
        theirs.cost / ours.cost
        for ours, theirs in pairs
        if ours and theirs and ours.cost and theirs.cost
    ]
    return Ratio(median(found), min(found), max(found)) if found else None


def _warm_up(sides: Sequence[Side], plan: Plan, chosen: random.Random, context: int | None) -> int:
    """Ask each side an untimed text and picture; return the words of a prompt of wanted length."""
    per_word = None
    for side in sides:
        trial = questions.text(TRIAL_WORDS, chosen.getrandbits(32), chosen.getrandbits(32))
        answer = side.endpoint.ask(trial, 4, to_the_end=True)
        if per_word is None and answer.prompt_tokens:
            per_word = answer.prompt_tokens / TRIAL_WORDS
        url = questions.picture(chosen.getrandbits(32))
        _try(side, "picture", questions.about(url, "?"), 1)
    wanted = plan.prompt_tokens
    if context is not None:
        wanted = min(wanted, context - plan.answer_tokens - SPARE_TOKENS)
    return max(1, round(wanted / (per_word or 1.3)))


def _round(side: Side, plan: Plan, words: int, body: int, own: int) -> None:
    prompt, url = questions.text(words, body, own), questions.picture(own)
    short = f"{questions.text(8, body, own + 1)}. Count from one to a thousand."
    for row, content in (
        ("prefill", prompt),
        ("same prompt again", prompt),
        ("picture", questions.about(url, questions.QUESTIONS[0])),
        ("same picture again", questions.about(url, questions.QUESTIONS[1])),
    ):
        answer = _try(side, row, content, 1)
        side.samples[row].append(None if answer is None else _whole(answer))
    answer = _try(side, "decode", short, plan.answer_tokens, to_the_end=True)
    side.samples["decode"].append(None if answer is None else _pace(answer))


def _try(
    side: Side, row: str, content: Any, length: int, *, to_the_end: bool = False
) -> Answer | None:
    """Ask, unless that was refused before; a refusal is kept with its message.

    Raises EndpointError if the endpoint fails without an HTTP status.
    """
    if row in side.refusals:
        return None
    try:
        return side.endpoint.ask(content, length, to_the_end=to_the_end)
    except EndpointError as error:
        if error.code is None:
            raise
        refused = ("picture", "same picture again") if row == "picture" else (row,)
        side.refusals |= dict.fromkeys(refused, error.message)
        return None


def _whole(answer: Answer) -> Sample:
    """Return the sample of a prompt: all of an answer of one token."""
    computed = answer.prompt_tokens
    return Sample(answer.seconds, computed, answer.cached_tokens, answer.seconds)


def _pace(answer: Answer) -> Sample | None:
    """Return the sample of a long answer behind a short prompt; None without any text.

    All of it counts: how many tokens the first chunk holds is not reported.
    """
    tokens, seconds = answer.completion_tokens, answer.seconds
    if answer.first is None:
        return None
    return Sample(seconds, tokens, answer.cached_tokens, seconds / tokens if tokens else None)
