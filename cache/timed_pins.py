"""Pins with an expiry: KV and state of a prompt that stay until a given time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.cache.records import Node, Snapshot


@dataclass(frozen=True, slots=True)
class TimedPin:
    nodes: tuple[Node, ...]
    snapshot: Snapshot | None
    until: float


class TimedPins:
    """Pins with expiry times. Times come from the caller, in any unit; there is no clock here.

    Pins hold at most half of the blocks, and no more snapshots than there are rows beyond the live
    ones. A request that runs alone and still lacks blocks releases them, earliest expiry first.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pins: dict[bytes, TimedPin] = {}

    @property
    def pins(self) -> tuple[TimedPin, ...]:
        return tuple(self._pins.values())

    @property
    def next_end(self) -> float | None:
        """The next expiry; None if there are no pins."""
        return min((pin.until for pin in self._pins.values()), default=None)

    def add(self, nodes: tuple[Node, ...], snapshot: Snapshot | None, until: float) -> bool:
        """Pin a path (its deepest node names it), or change the expiry of an existing pin.

        Returns False, without any change, if pins would hold too much.
        """
        assert nodes, "nothing to pin"
        others = [pin for key, pin in self._pins.items() if key != nodes[-1].key]
        blocks = {node.block.id for pin in others for node in pin.nodes}
        blocks |= {node.block.id for node in nodes}
        snapshots = sum(pin.snapshot is not None for pin in others) + (snapshot is not None)
        config = self._ledger.config
        if len(blocks) > config.num_blocks // 2 or snapshots > config.num_snapshot_rows:
            return False
        for node in nodes:
            self._ledger.pin(node)
        if snapshot is not None:
            self._ledger.pin_snapshot(snapshot)
        self._release(nodes[-1].key)
        self._pins[nodes[-1].key] = TimedPin(nodes, snapshot, until)
        return True

    def expire(self, now: float) -> int:
        """Release the expired pins and return their number."""
        due = [key for key, pin in self._pins.items() if pin.until <= now]
        for key in due:
            self._release(key)
        return len(due)

    def give_way(self) -> None:
        """Release the pin with the earliest expiry."""
        self._release(min(self._pins, key=lambda key: self._pins[key].until))
        self._ledger.events.counted.publish(("evictions", "timed_pin"))

    def clear(self) -> None:
        for key in list(self._pins):
            self._release(key)

    def _release(self, key: bytes) -> None:
        pin = self._pins.pop(key, None)
        if pin is None:
            return
        if pin.snapshot is not None:
            self._ledger.unpin_snapshot(pin.snapshot)
        for node in reversed(pin.nodes):
            self._ledger.unpin(node)
