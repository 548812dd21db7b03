"""An answer printed while it is generated, its thought apart."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from vlm_serve.engine.requests.outputs import Delta


def dimmed(text: str, stream: TextIO) -> str:
    """Return a text as a terminal shows it dimly; to a file it goes as it is."""
    dim = stream.isatty() and not os.environ.get("NO_COLOR")
    return f"\x1b[2m{text}\x1b[22m" if dim else text


class Printer:
    """Prints one answer to standard output.

    The thought goes to standard error, so that standard output has the answer alone.

    Args:
        shown: the thought is printed too, dim on a terminal.

    Attributes:
        text, reasoning: what has come so far.
        last: the last increment.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self.text = self.reasoning = ""
        self.last: Delta | None = None

    def print(self, delta: Delta) -> None:
        """Print an increment."""
        if delta.reasoning:
            self.reasoning += delta.reasoning
            self._note(dimmed(delta.reasoning, sys.stderr))
        if delta.text:
            if self.reasoning and not self.text:
                self._note("\n\n")
            self.text += delta.text
            print(delta.text, end="", flush=True)
        self.last = delta

    def _note(self, text: str) -> None:
        if self._shown:
            print(text, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line, and say so if the tokens were used up before the answer began."""
        if self.reasoning and not self.text:
            self._note("\n")
        print()
        last = self.last
        if last is None or last.finish_reason != "length" or self.text:
            return
        used = f"{last.usage.completion_tokens} tokens"
        ended = f"the thought took all {used}" if self.reasoning else f"{used} gave no text"
        note = f"vlm-serve: there is no answer: {ended}; allow more with --max-tokens"
        print(note, file=sys.stderr)
