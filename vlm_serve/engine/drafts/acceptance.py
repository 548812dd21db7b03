"""Acceptance rates of drafts, learned from earlier drafts with the same evidence."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from vlm_serve.engine.drafts.base import MAX_EVIDENCE
from vlm_serve.engine.sequence import Sequence

_FIRST_RATE = 0.7
_WEIGHT, _COMMON_WEIGHT = 0.2, 0.02
_FIRST_PAUSE, _MAX_PAUSE = 8, 256
_MAX_TENANTS = 1024


@dataclass(slots=True)
class Acceptance:
    """Recent acceptance rates of one drafter.

    Attributes:
        rates: by evidence, the probability that a draft is accepted if all before it are.
        pause: number of steps without drafts, while they are not worth it, before one is tried.
        paused: number of such steps so far.
    """

    rates: list[float] = field(default_factory=lambda: [_FIRST_RATE] * (MAX_EVIDENCE + 1))
    pause: int = _FIRST_PAUSE
    paused: int = 0

    def chances(self, drafted: int, evidence: int = 0) -> list[float]:
        """Return for each of `drafted` drafts the probability that it and all before it are
        accepted.

        Args:
            evidence: evidence for the first draft.
        """
        levels = range(evidence, evidence + drafted)
        return list(accumulate((self.rates[min(each, MAX_EVIDENCE)] for each in levels), mul))

    def expected_accepted(self, drafted: int, evidence: int = 0) -> float:
        """Return the expected number of accepted drafts."""
        return sum(self.chances(drafted, evidence))

    def learn(
        self, drafted: int, accepted: int, evidence: int = 0, weight: float = _WEIGHT
    ) -> None:
        """Record that the first `accepted` of `drafted` drafts were accepted and the next one was
        not."""
        rates = self.rates
        for place, held in enumerate((True,) * accepted + (False,) * (accepted < drafted)):
            level = min(evidence + place, MAX_EVIDENCE)
            rates[level] += weight * (held - rates[level])
        self.paused = 0
        failed = drafted and not accepted
        self.pause = min(2 * self.pause, _MAX_PAUSE) if failed else _FIRST_PAUSE


class AcceptanceTracker:
    """Tracks acceptance rates by sequence and drafter. A new sequence starts with the rates of its
    tenant; a new tenant starts with a guess."""

    def __init__(self) -> None:
        self._own: dict[int, dict[int, Acceptance]] = {}
        self._common: OrderedDict[tuple[bytes, int], Acceptance] = OrderedDict()

    def of(self, sequence: Sequence, drafter: int) -> Acceptance:
        own = self._own.setdefault(sequence.number, {})
        if drafter not in own:
            common = self._common.get((sequence.keys.root, drafter), Acceptance())
            own[drafter] = Acceptance(common.rates.copy())
        return own[drafter]

    def learn(
        self, sequence: Sequence, drafter: int, evidence: int, drafted: int, accepted: int
    ) -> None:
        """Record how many of a sequence's drafts were accepted; `evidence` is that of the first."""
        self.of(sequence, drafter).learn(drafted, accepted, evidence)
        place = (sequence.keys.root, drafter)
        self._common.setdefault(place, Acceptance()).learn(
            drafted, accepted, evidence, _COMMON_WEIGHT
        )
        self._common.move_to_end(place)
        if len(self._common) > _MAX_TENANTS:
            self._common.popitem(last=False)

    def forget(self, sequence: Sequence) -> None:
        """Drop the data of a finished sequence."""
        self._own.pop(sequence.number, None)
