"""What is thought of drafts, from what has become of others like them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from vlm_serve.engine.sequence import Sequence

_FIRST_RATE = 0.7
_WEIGHT, _COMMON_WEIGHT = 0.2, 0.02
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 256
_MOST_TENANTS = 1024


class Source(NamedTuple):
    """Where drafts come from.

    Attributes:
        drafter: its place among them.
        sure: whether much speaks for them.
    """

    drafter: int = 0
    sure: bool = True


@dataclass(slots=True)
class Trust:
    """What has become of drafts of one source lately.

    Attributes:
        rate: how likely a draft holds if those before it do.
        pause: steps without drafts, while they are not worth it, before one is tried.
        paused: of those, how many have passed.
    """

    rate: float = _FIRST_RATE
    pause: int = _FIRST_PAUSE
    paused: int = 0

    def promise(self, drafted: int) -> float:
        """How many of so many drafts are likely to hold."""
        return sum(self.rate**place for place in range(1, drafted + 1))

    def learn(self, drafted: int, accepted: int, weight: float = _WEIGHT) -> None:
        """The first `accepted` of some drafts held, and the next one did not."""
        for held in (True,) * accepted + (False,) * (accepted < drafted):
            self.rate += weight * (held - self.rate)
        self.paused = 0
        failed = drafted and not accepted
        self.pause = min(2 * self.pause, _LONGEST_PAUSE) if failed else _FIRST_PAUSE


class Trusts:
    """In each source of each sequence. A new sequence's begins with what has become of the drafts
    of its tenant, one for whom all is new with a guess."""

    def __init__(self) -> None:
        self._own: dict[int, dict[Source, Trust]] = {}
        self._common: OrderedDict[tuple[bytes, Source], Trust] = OrderedDict()

    def of(self, sequence: Sequence, source: Source) -> Trust:
        own = self._own.setdefault(sequence.number, {})
        if source not in own:
            common = self._common.get((sequence.keys.root, source), Trust())
            own[source] = Trust(common.rate)
        return own[source]

    def learn(self, sequence: Sequence, source: Source, drafted: int, accepted: int) -> None:
        """So many of a sequence's drafts held."""
        self.of(sequence, source).learn(drafted, accepted)
        place = (sequence.keys.root, source)
        self._common.setdefault(place, Trust()).learn(drafted, accepted, _COMMON_WEIGHT)
        self._common.move_to_end(place)
        if len(self._common) > _MOST_TENANTS:
            self._common.popitem(last=False)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._own.pop(sequence.number, None)
