"""What is thought of drafts, from what has become of others like them."""

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
    """What has become of one drafter's drafts lately.

    Attributes:
        rates: by evidence how likely a draft holds if those before it do.
        pause: steps without drafts, while they are not worth it, before one is tried.
        paused: of those, how many have passed.
    """

    rates: list[float] = field(default_factory=lambda: [_FIRST_RATE] * (MAX_EVIDENCE + 1))
    pause: int = _FIRST_PAUSE
    paused: int = 0

    def chances(self, drafted: int, evidence: int = 0) -> list[float]:
        """How likely each of some drafts holds, with all before it; `evidence`: of the first."""
        levels = range(evidence, evidence + drafted)
        return list(accumulate((self.rates[min(each, MAX_EVIDENCE)] for each in levels), mul))

    def expected_accepted(self, drafted: int, evidence: int = 0) -> float:
        """How many of so many drafts are likely to hold."""
        return sum(self.chances(drafted, evidence))

    def learn(
        self, drafted: int, accepted: int, evidence: int = 0, weight: float = _WEIGHT
    ) -> None:
        """The first `accepted` of some drafts held, and the next one did not."""
        rates = self.rates
        for place, held in enumerate((True,) * accepted + (False,) * (accepted < drafted)):
            level = min(evidence + place, MAX_EVIDENCE)
            rates[level] += weight * (held - rates[level])
        self.paused = 0
        failed = drafted and not accepted
        self.pause = min(2 * self.pause, _MAX_PAUSE) if failed else _FIRST_PAUSE


class AcceptanceTracker:
    """In each drafter, for each sequence. A new sequence's begins with what has become of the
    drafts of its tenant, one for whom all is new with a guess."""

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
        """So many of a sequence's drafts held; `evidence`: of the first."""
        self.of(sequence, drafter).learn(drafted, accepted, evidence)
        place = (sequence.keys.root, drafter)
        self._common.setdefault(place, Acceptance()).learn(
            drafted, accepted, evidence, _COMMON_WEIGHT
        )
        self._common.move_to_end(place)
        if len(self._common) > _MAX_TENANTS:
            self._common.popitem(last=False)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._own.pop(sequence.number, None)
