"""Tells a quoted tool call from one that is made."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARK = re.compile(r"(?:\A|[\s(\[{:=])[`\"'“‘«]\Z")
_FENCE = re.compile(r"`{3,}[^\n`]{0,64}\n\s*\Z")
_KEPT = 160


@dataclass(slots=True)
class Quoting:
    """What stands before a call, as far as it may quote it.

    Attributes:
        tail: the last characters.
        fenced: an odd number of fences is before them.
        ticks: backticks at the very end, which may go on.
    """

    tail: str = ""
    fenced: bool = False
    ticks: int = 0

    def passed(self, text: str) -> None:
        """Take the text that comes next."""
        for run in re.findall(r"`+|[^`]+", text):
            if run[0] == "`":
                self.ticks += len(run)
            else:
                self._end_ticks()
        self.tail = (self.tail + text)[-_KEPT:]

    def quotes(self, space: str) -> bool:
        """True if a call behind this white space is quoted: a quotation mark is right before it, or
        the line before it opens a block of code."""
        before = self.tail + space
        if not space and _MARK.search(before):
            return True
        return self.fenced != (self.ticks >= 3) and _FENCE.search(before) is not None

    def _end_ticks(self) -> None:
        self.fenced ^= self.ticks >= 3
        self.ticks = 0
