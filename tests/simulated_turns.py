"""What next turns share with answers in the simulation: anything, known some steps later."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from vlm_serve.engine.features.endings.endings import EndingMode
from vlm_serve.engine.requests.outputs import FinishReason
from vlm_serve.engine.requests.sequence import Sequence as EngineSequence

ENDING_MODES: tuple[EndingMode, ...] = ("off", "auto", "always", "always")


class AnyTurn:
    """A next turn that is only asked about by `NextTurns`."""

    kind = "chat"

    def shared(self, text: str, token_ids: Sequence[int], reason: FinishReason) -> int:
        raise AssertionError("the simulation has no thread to ask on")


class NextTurns:
    """Reports what next turns share, in any order.

    Args:
        rng: decides what, and when.

    Attributes:
        asked: what is not reported yet: the number of shared tokens, and where to report it.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.asked: list[tuple[int, Callable[[int], None]]] = []

    def ask(self, sequence: EngineSequence, report: Callable[[int], None]) -> None:
        length = sequence.num_tokens
        shared = self._rng.choice([0, length, length, self._rng.randint(0, length)])
        if self._rng.random() < 0.3:
            report(shared)
        else:
            self.asked.append((shared, report))

    def step(self) -> None:
        """A step goes by."""
        while self.asked and self._rng.random() < 0.6:
            shared, report = self.asked.pop(self._rng.randrange(len(self.asked)))
            report(shared)
