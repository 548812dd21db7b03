"""The snapshots that may be evicted, and which of them is worth the least
(docs/architecture.md#state).

A snapshot is worth what it is expected to save with each prompt that comes: the tokens that have to
be computed again without it, times the rate at which it is asked for. That rate is estimated by its
uses, past and expected ones, over the prompts since the last of them and a horizon: the mean of a
Poisson rate whose prior is a Gamma distribution. The order of two snapshots changes while neither
is used, so no queue can keep it: all of them are rated whenever one has to go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_serve.cache.records import Snapshot

_PROMPTS_PER_RATING = 32
"""Prompts after which the worth of all is computed anew, because what is learned of a kind's use
changes that of all its snapshots."""


class SpareRows:
    """Ready and unpinned snapshots by row, in columns.

    Args:
        num_rows: of the pool.

    Attributes:
        prompts: number of prompts admitted so far.
        horizon: prompts after which reuse mostly comes; see `Places.horizon`.
    """

    def __init__(self, num_rows: int) -> None:
        self.prompts = 0
        self.horizon = 1.0
        self._snapshots: dict[int, Snapshot] = {}
        self._worth = np.full(num_rows, np.inf)
        self._asked = np.zeros(num_rows)
        self._last_used = np.zeros(num_rows)

    def __len__(self) -> int:
        return len(self._snapshots)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(tuple(self._snapshots.values()))

    def put(self, snapshot: Snapshot) -> None:
        """Add a snapshot, or compute its worth anew."""
        row = snapshot.row
        self._snapshots[row] = snapshot
        self._worth[row] = snapshot.worth
        self._asked[row], self._last_used[row] = snapshot.asked, snapshot.last_used

    def discard(self, snapshot: Snapshot) -> None:
        """Remove a snapshot if it is one of them."""
        if self._snapshots.pop(snapshot.row, None) is not None:
            self._worth[snapshot.row] = np.inf

    def admit(self, horizon: float) -> None:
        """Count a prompt, and take over the horizon that holds from it on."""
        self.horizon = horizon
        self.prompts += 1
        if self.prompts % _PROMPTS_PER_RATING == 0:
            for snapshot in self:
                self.put(snapshot)

    def new_value(self, worth: float) -> float:
        """Return the value of a snapshot that is made now, in tokens per prompt.

        Args:
            worth: tokens that it saves, times its expected uses.
        """
        return worth / self.horizon

    def cheapest(self) -> tuple[float, Snapshot] | None:
        """Return the least value, in tokens per prompt, and its snapshot, the least recently used
        one of several; None if there is none."""
        while self._snapshots:
            values = self._worth / (self.prompts + self.horizon - self._asked)
            row = int(values.argmin())
            equal = values == values[row]
            if np.count_nonzero(equal) > 1:
                row = int(np.where(equal, self._last_used, np.inf).argmin())
            snapshot = self._snapshots[row]
            if snapshot.worth <= self._worth[row]:
                return float(values[row]), snapshot
            self.put(snapshot)  # one before it has gone since, so that it saves more
        return None
