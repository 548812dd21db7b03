"""Pins with an expiry: KV and state of a prompt that stay until a given time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlm_serve.cache.records import Node

if TYPE_CHECKING:
    from vlm_serve.cache.ledger import Ledger
    from vlm_serve.cache.records import Snapshot


@dataclass(frozen=True, slots=True)
class TimedPin:
    """A pinned path.

    Attributes:
        nodes: from the root on; the deepest one names the pin.
        snapshot: the pinned state; None: there is none.
        until: its expiry.
        owner: the key of the tenant's root.
    """

    nodes: tuple[Node, ...]
    snapshot: Snapshot | None
    until: float
    owner: bytes

    @property
    def key(self) -> bytes:
        """Key of the deepest node."""
        return self.nodes[-1].key


class TimedPins:
    """Pins with expiry times. Times come from the caller, in any unit; there is no clock here.

    Pins hold at most half of the blocks, and no more snapshots than there are rows beyond the live
    ones. A request that runs alone and still lacks blocks releases them, earliest expiry first.

    Owners share that space fairly: a pin that does not fit takes the place of those of an owner
    that holds more, as long as its own owner holds less.

    Attributes:
        next_end: the next expiry; None: there are no pins.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.next_end: float | None = None
        self._ledger = ledger
        self._pins: dict[bytes, TimedPin] = {}

    @property
    def pins(self) -> tuple[TimedPin, ...]:
        return tuple(self._pins.values())

    def add(
        self, nodes: Sequence[Node], snapshot: Snapshot | None, until: float, owner: bytes | None
    ) -> bool:
        """Add a pin, or change the expiry of an existing one of the same deepest node.

        Args:
            nodes: its path from the root on.
            snapshot: the state to keep; None: there is none.
            until: its expiry.
            owner: whose it is; None: its root's.

        Returns False, without any change, if pins would hold too much.
        """
        new = TimedPin(tuple(nodes), snapshot, until, owner or nodes[0].parent.key)
        key = new.key
        others = {name: pin for name, pin in self._pins.items() if name != key}
        leaving = []
        config = self._ledger.config
        most = {_blocks: config.num_blocks // 2, _snapshots: config.num_snapshot_rows}
        for held, limit in most.items():
            while held((*others.values(), new)) > limit:
                victim = _one_with_more(others, new, held)
                if victim is None:
                    return False
                del others[victim]
                leaving.append(victim)
        self._ledger.hold_path(new.nodes, pins=1)
        if new.snapshot is not None:
            self._ledger.pin_snapshot(new.snapshot)
        for name in (*leaving, key):
            self._release(name)
        for _ in leaving:
            self._ledger.events.counted.publish(("evictions", "timed_pin"))
        self._pins[key] = new
        self._find_next_end()
        return True

    def add_node(self, node: Node, until: float, owner: bytes | None = None) -> int:
        """Keep a node, all nodes before it and the deepest state there until time `until`. Without
        an owner, its root owns the pin.

        Returns the tokens pinned; 0 if the node was evicted, or if pins would hold too much.
        """
        if node.parent.children.get(node.key) is not node:
            return 0
        path = [node]
        while isinstance(path[-1].parent, Node):
            path.append(path[-1].parent)
        states = (ancestor.snapshot for ancestor in path if ancestor.snapshot is not None)
        return node.end if self.add(path[::-1], next(states, None), until, owner) else 0

    def expire(self, now: float) -> int:
        """Release the expired pins and return their number."""
        return self.lift(lambda pin: pin.until <= now)

    def lift(self, wanted: Callable[[TimedPin], bool]) -> int:
        """Release the wanted pins and return their number."""
        due = [key for key, pin in self._pins.items() if wanted(pin)]
        for key in due:
            self._release(key)
        self._find_next_end()
        return len(due)

    def give_way(self) -> None:
        """Release the pin with the earliest expiry."""
        self._release(min(self._pins, key=lambda key: self._pins[key].until))
        self._find_next_end()
        self._ledger.events.counted.publish(("evictions", "timed_pin"))

    def clear(self) -> None:
        self.lift(lambda pin: True)

    def _find_next_end(self) -> None:
        self.next_end = min((pin.until for pin in self._pins.values()), default=None)

    def _release(self, key: bytes) -> None:
        pin = self._pins.pop(key, None)
        if pin is None:
            return
        if pin.snapshot is not None:
            self._ledger.unpin_snapshot(pin.snapshot)
        self._ledger.hold_path(pin.nodes, pins=-1)


def _blocks(pins: Iterable[TimedPin]) -> int:
    return len({node.block.id for pin in pins for node in pin.nodes})


def _snapshots(pins: Iterable[TimedPin]) -> int:
    return sum(pin.snapshot is not None for pin in pins)


def _one_with_more(
    others: Mapping[bytes, TimedPin], new: TimedPin, held: Callable[[Iterable[TimedPin]], int]
) -> bytes | None:
    """Return the pin that ends first of the owner that holds most, if the new pin's owner would
    hold less than that; else None."""
    owners: dict[bytes, list[TimedPin]] = {}
    for pin in (*others.values(), new):
        owners.setdefault(pin.owner, []).append(pin)
    largest = max(owners, key=lambda owner: held(owners[owner]))
    if held(owners[largest]) <= held(owners[new.owner]):
        return None
    return min(
        (key for key, pin in others.items() if pin.owner == largest),
        key=lambda key: others[key].until,
    )
