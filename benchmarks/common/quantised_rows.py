"""The rows of `quantised.py`, each measured by itself, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common import media_trace
from common.engine_cases import AGAIN, DECODE, PREFILL, Side, Work

IMAGE = "same image, another question"
PLAIN_READ = "plain read"
ROWS = ("decode-1", "decode-8", "prefill", "image")
SETTLE_SECONDS = 0.1
"""Idle threads of the side before spin for a while, on everybody's cores."""

Ask = Callable[[Side], dict[str, float]]


@dataclass
class Row:
    """One part of the work, and the rows of the table that its seconds stand for.

    Attributes:
        names: the rows, with the tokens that their seconds stand for, or None.
        next: what a round asks of every side.
        tower: whether pictures are looked at.
        plain: whether ours in bfloat16 takes part.
        read: whether a plain read of a token's bytes does.
    """

    names: dict[str, int | None]
    next: Callable[[], Ask]
    tower: bool = False
    plain: bool = False
    read: bool = False

    def takes(self, side: str, own: str) -> bool:
        """Whether a side takes part beside that one of ours."""
        if side == PLAIN_READ:
            return self.read
        return self.plain or side == own or not side.startswith("ours")

    def parts(self) -> list[Ask]:
        """As `engine_cases.Results` wants it."""
        ask = self.next()

        def settled(side: Side) -> dict[str, float]:
            time.sleep(SETTLE_SECONDS)
            return ask(side)

        return [settled]

    @staticmethod
    def cell(seconds: float, tokens: int | None) -> str:
        """What the table says of a median."""
        return f"{1000 * seconds:.0f} ms" if tokens is None else f"{tokens / seconds:.1f} tok/s"


def rows_for(work: Work, wanted: Sequence[str], lengths: Sequence[int]) -> list[Row]:
    """The rows of those names, with prompts of so many tokens."""
    decode = dict(zip(ROWS, DECODE, strict=False))
    found: list[Row] = []
    for name in wanted:
        if name in decode:
            batch = decode[name]
            ask = work.decode_of(batch)
            tokens = {DECODE[batch]: batch * work.steps}
            found.append(Row(tokens, lambda ask=ask: ask, plain=True, read=batch == 1))
        elif name == "prefill":
            found += [_prefill(work, length, twice=length == max(lengths)) for length in lengths]
        else:
            found.append(Row({IMAGE: None}, Pictures().next, tower=True))
    return found


def _prefill(work: Work, length: int, *, twice: bool) -> Row:
    row = f"{PREFILL}, {length}"

    def ask(side: Side) -> dict[str, float]:
        prompts = [work.prompt(length)]
        seconds = {row: side.complete(prompts, 1)}
        if twice:
            seconds[AGAIN] = side.complete(prompts, 1)
        return seconds

    names: dict[str, int | None] = {row: length}
    return Row(names | {AGAIN: None} if twice else names, lambda: ask)


class Pictures:
    """Another photograph in every round, each with two questions."""

    def __init__(self) -> None:
        self._round = 0

    def next(self) -> Ask:
        trace = media_trace.requests(self._round)
        which = self._round % len(media_trace.PHOTOGRAPHS)
        first, second = trace[which], trace[len(media_trace.PHOTOGRAPHS) + which]
        self._round += 1

        def ask(side: Side) -> dict[str, float]:
            server = side.server  # type: ignore[attr-defined]  # all sides here have one
            server.post("/v1/chat/completions", first)
            return {IMAGE: server.post("/v1/chat/completions", second)[1]}

        return ask
