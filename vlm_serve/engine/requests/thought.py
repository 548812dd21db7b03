"""Follows the thought of one choice, and ends it once its budget of tokens is used up.

What comes next is a function of the tokens so far. So drafts, preemption, replays and several
choices need nothing of their own: a closing token is a mask that allows one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from vlm_serve.preprocess.text.family import THINK_END, THINK_START, TOOL_START

CLOSING = f"\n{THINK_END}"
"""How a thought ends whose budget is used up: as templates write it."""


@dataclass(frozen=True, slots=True)
class Thought:
    """How an answer may think.

    Attributes:
        opened: the prompt has opened the thought; otherwise the answer opens it or has none.
        calls: a tool call inside the thought ends it.
        quiet: stop strings have no effect inside the thought.
    """

    opened: bool
    calls: bool = False
    quiet: bool = True


class ThoughtState:
    """The place of one choice: before, inside or behind its thought, or in white space behind it.

    Args:
        thought: how the answer may think.
        token_bytes: returns the bytes of a token.
        budget: maximum tokens of the thought, counted from the answer's start or its own opening
            mark; None means any number.
        closing: tokens that end a thought whose budget is used up.
    """

    def __init__(
        self,
        thought: Thought,
        token_bytes: Callable[[int], bytes],
        budget: int | None = None,
        closing: Sequence[int] = (),
    ) -> None:
        self.quiet = thought.quiet
        self._token_bytes = token_bytes
        self._budget, self._closing = budget, tuple(closing)
        self._ends = (THINK_END.encode(), *((TOOL_START.encode(),) if thought.calls else ()))
        self._place: Literal["before", "inside", "space", "behind"] = (
            "inside" if thought.opened else "before"
        )
        self._count = 0
        self._tail = b""

    @property
    def has_budget(self) -> bool:
        """True if it may have to end before it ends itself."""
        return self._budget is not None

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None if any may."""
        if self._budget is None or self._place != "inside" or self._count < self._budget:
            return None
        return self._closing[self._count - self._budget]

    def accept(self, token: int) -> int:
        """Advance by a token; return how many of its bytes the thought has.

        Its mark and the white space behind that count too: they are no part of the answer.
        """
        if self._place == "behind":
            return 0
        data = self._token_bytes(token)
        if self._place == "space":
            return self._skip(data)
        if self._place == "inside":
            self._count += 1
            return self._think(data)
        start = (self._tail + data).lstrip()
        if start.startswith(THINK_START.encode()):
            self._place, self._tail = "inside", b""
            rest = start[len(THINK_START) :]
            return len(data) - len(rest) + self._think(rest)
        if THINK_START.encode().startswith(start):
            self._tail = start
        else:
            self._place = "behind"
        return 0

    def _think(self, data: bytes) -> int:
        """Look for the end of the thought; return how many of the bytes belong to it."""
        text = self._tail + data
        places = [(text.find(end), end) for end in self._ends if end in text]
        if not places:
            self._tail = text[1 - max(map(len, self._ends)) :]
            return len(data)
        at, end = min(places)
        size = max(0, at + len(end) - len(self._tail))
        self._place = "behind"
        return size + self._skip(data[size:]) if end == THINK_END.encode() else size

    def _skip(self, data: bytes) -> int:
        """Return how many white space bytes stand before the answer's text."""
        rest = data.lstrip()
        self._place = "behind" if rest else "space"
        return len(data) - len(rest)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Forget on exit the tokens that were accepted inside, for drafts."""
        before = (self._place, self._count, self._tail)
        try:
            yield
        finally:
            self._place, self._count, self._tail = before
