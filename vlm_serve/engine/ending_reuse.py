"""Learns how often the end of an answer is where a next turn starts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from vlm_serve.cache.reasons import key_at
from vlm_serve.preprocess.keys import PromptKeys

_REMEMBERED = 1024
"""Ends of answers that may still be continued. An end that leaves the memory never was."""
_GROUPS = 256
_DECAY = 0.98
"""Weight of all earlier ends of a group after each further one."""
_PRIOR = 4.0
"""Ends, all of them continued, that a new group begins with."""

Group = tuple[bytes, str]
"""Root key of the prompts (a tenant of one model), and kind of requests."""


@dataclass(slots=True)
class _Counts:
    ends: float = _PRIOR
    continued: float = _PRIOR

    def add(self, *, continued: bool) -> None:
        self.ends = _DECAY * self.ends + 1
        self.continued = _DECAY * self.continued + continued


class EndReuse:
    """Remembers ends of answers by their keys, and counts which of them a prompt contains later.

    Snapshots play no part in that: an end without one counts as well, so a group that has stopped
    to come back can start again. Both memories are bounded.
    """

    def __init__(self) -> None:
        self._ends: OrderedDict[bytes, Group] = OrderedDict()
        self._groups: OrderedDict[Group, _Counts] = OrderedDict()

    def rate(self, group: Group) -> float:
        """Return the share of the group's ends that a next turn continues, from 0 to 1."""
        counts = self._groups.get(group)
        return 1.0 if counts is None else counts.continued / counts.ends

    def ended(self, group: Group, key: bytes) -> None:
        """Remember the end of an answer by the key of its prefix."""
        self._ends[key] = group
        self._ends.move_to_end(key)
        while len(self._ends) > _REMEMBERED:
            self._count(self._ends.popitem(last=False)[1], continued=False)

    def forget(self, key: bytes) -> None:
        """Forget an end that the next turn cannot share, whatever its traffic."""
        self._ends.pop(key, None)

    def asked(self, keys: PromptKeys) -> None:
        """Count the deepest remembered end that a new prompt continues."""
        for cut in reversed(keys.cuts):
            group = self._ends.pop(key_at(keys, cut), None)
            if group is not None:
                self._count(group, continued=True)
                return

    def _count(self, group: Group, *, continued: bool) -> None:
        self._groups.setdefault(group, _Counts()).add(continued=continued)
        self._groups.move_to_end(group)
        if len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)
