"""State rows: live rows of running requests and snapshots, in one pool."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class RowState(Enum):
    """FREE -> LIVE -> FREE for a running request; FREE -> RESERVED -> READY -> FREE for a snapshot.

    The live row of a request that ends at a cut point may become RESERVED, and so a snapshot.
    PRIVATE is the row of a suspended request: LIVE -> PRIVATE -> LIVE, or FREE.
    """

    FREE = "free"
    LIVE = "live"
    RESERVED = "reserved"
    READY = "ready"
    PRIVATE = "private"


class RowPool:
    """Free list and the state of every row."""

    def __init__(
        self, num_rows: int, num_live_rows: int, on_free: Callable[[int], None] | None = None
    ) -> None:
        self.states = [RowState.FREE] * num_rows
        self.num_live_rows = num_live_rows
        self.num_live = 0
        self._free = list(range(num_rows - 1, -1, -1))
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_rows(self) -> tuple[int, ...]:
        return tuple(self._free)

    @property
    def may_go_live(self) -> bool:
        """True while fewer rows are live than running requests may hold."""
        return self.num_live < self.num_live_rows

    def take(self, state: RowState) -> int:
        """Return a free row, now in `state`."""
        row = self._free.pop()
        self.change(row, RowState.FREE, state)
        return row

    def change(self, row: int, old: RowState, new: RowState) -> None:
        """Move a row from one state to another; FREE returns it to the pool."""
        assert self.states[row] is old, f"row {row} is {self.states[row].value}, not {old.value}"
        self.num_live += (new is RowState.LIVE) - (old is RowState.LIVE)
        assert self.num_live <= self.num_live_rows, "more live rows than running requests may hold"
        self.states[row] = new
        if new is RowState.FREE:
            self._free.append(row)
            if self._on_free is not None:
                self._on_free(row)
