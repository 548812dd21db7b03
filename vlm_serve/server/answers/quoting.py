"""Distinguishing quoted tool calls from real ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARK = re.compile(r"(?:\A|[\s(\[{:=])[`\"'“‘«]\Z")
_FENCE = re.compile(r"`{3,}[^\n`]{0,64}\n\s*\Z")
_KEPT = 160


@dataclass(slots=True)
class Quoting:
    """The text before a call, reduced to possible quotation marks.

    Attributes:
        tail: the last characters.
        fenced: an odd number of code fences precedes.
        ticks: number of backticks at the very end; more may follow.
    """

    tail: str = ""
    fenced: bool = False
    ticks: int = 0

    def add(self, text: str) -> None:
        """Add the next text."""
        for run in re.findall(r"`+|[^`]+", text):
            if run[0] == "`":
                self.ticks += len(run)
            else:
                self._end_ticks()
        self.tail = (self.tail + text)[-_KEPT:]

    def quotes(self, space: str) -> bool:
        """Return True if a call after this white space is quoted.

        It is if a quotation mark precedes it directly, or the line before opens a code block.
        """
        before = self.tail + space
        if not space and _MARK.search(before):
            return True
        return self.fenced != (self.ticks >= 3) and _FENCE.search(before) is not None

    def _end_ticks(self) -> None:
        self.fenced ^= self.ticks >= 3
        self.ticks = 0
