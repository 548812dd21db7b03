"""Slots of adapters: which of them are laid out for the executor. Used by the engine's thread."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from vlm_serve.errors import OverloadedError
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.models.adapters import Adapter

if TYPE_CHECKING:
    from vlm_serve.engine.requests.sequence import Sequence

NO_SLOT = -1
NO_MEMORY = "there is no memory for the request's adapter now: try again later"


class AdapterSlots:
    """A few adapters for the steps to use; the others wait in host memory.

    A waiting sequence starts when its adapter has a slot. A slot whose adapter is in use is never
    given away; of the others, the least recently used one is. Adapters are laid out on a thread of
    their own, and other requests go on meanwhile.

    Args:
        count: number of slots.
        hold: puts an adapter into an executor's slot, or takes it away (None).
        lay_out: prepares changes for the executor; slow, and called on another thread.
        pool: of that thread; None: one of its own.
        room: bytes of factors that are laid out at a time; None: no limit. An adapter of more is
            laid out alone.
    """

    def __init__(
        self,
        count: int,
        hold: Callable[[int, Adapter | None], None],
        lay_out: Callable[[AdapterChanges], None] = lambda _: None,
        pool: Executor | None = None,
        room: int | None = None,
    ) -> None:
        assert count > 0
        self._hold = hold
        self._lay_out = lay_out
        self._held: list[Adapter | None] = [None] * count
        self._last_use = [0] * count
        self._clock = 0
        self._coming: dict[int, Future[None]] = {}
        self._asking: dict[int, int] = {}
        self._pool, self._room = pool, room
        self._failed: dict[str, tuple[int, BaseException]] = {}
        self._missed = False
        self.wake: Callable[[], None] = lambda: None
        """Called on another thread when an adapter is ready."""
        self.num_loads = 0

    @property
    def busy(self) -> bool:
        """Whether an adapter is being laid out."""
        return bool(self._coming)

    @property
    def missed(self) -> bool:
        """Whether a sequence of this pass waits for a slot, since all are in use."""
        return self._missed

    @property
    def resident(self) -> list[str]:
        """Digests of the adapters with a slot."""
        return [adapter.digest for adapter in self._held if adapter is not None]

    def begin_pass(self) -> None:
        """Start a pass over the waiting sequences.

        Adapters that have been laid out are in their slots from here on, also if nobody starts with
        them: sequences with better priority may need the slots.
        """
        self._missed = False
        for slot, coming in list(self._coming.items()):
            if coming.done():
                self._settle(slot, coming)

    def _settle(self, slot: int, coming: Future[None]) -> None:
        del self._coming[slot]
        held, asking = self._held[slot], self._asking.pop(slot)
        assert held is not None
        error = coming.exception()
        if error is not None:
            self._held[slot] = None
            # What has been laid out of it lives as long as the error's frames.
            traceback.clear_frames(error.__traceback__)
            self._failed[held.digest] = asking, error
            return
        self._hold(slot, held)

    def may_start(self, sequence: Sequence, users: Iterable[Sequence]) -> bool:
        """Tell whether a sequence's adapter is ready, and give it the number of its slot. Slots of
        `users` are in use.

        Behind a sequence that waits for a slot, none with an adapter starts: slots would never
        become free.

        Raises:
            OverloadedError: there was no memory for the adapter that this sequence asked for. What
                else laying it out has raised is raised too.
        """
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        asking, error = self._failed.pop(adapter.digest, (None, None))
        if error is not None and asking == sequence.number:
            if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise OverloadedError(NO_MEMORY) from error
            raise error
        if self._missed:
            return False
        slot = self._find(adapter)
        if slot is None:
            slot = self._place(adapter, {user.adapter_slot for user in users})
            if slot is not None:
                self._asking[slot] = sequence.number
        if slot is None:
            self._missed = True
            return False
        self._clock += 1
        self._last_use[slot] = self._clock
        if slot in self._coming:
            return False
        sequence.adapter_slot = slot
        return True

    def _find(self, adapter: Adapter) -> int | None:
        for slot, held in enumerate(self._held):
            if held is not None and held.digest == adapter.digest:
                return slot
        return None

    def _place(self, adapter: Adapter, used: set[int]) -> int | None:
        """Give an adapter the least recently used slot; None if all are in use, or if the others
        leave too little room."""
        free = [slot for slot in range(len(self._held)) if slot not in used | set(self._coming)]
        free.sort(key=lambda slot: (self._held[slot] is not None, self._last_use[slot]))
        if not free:
            return None
        slot, *others = free
        leaving = [slot, *(other for other in others if self._held[other] is not None)]
        count = next(
            (count for count in range(1, len(leaving) + 1) if self._fits(adapter, leaving[:count])),
            None,
        )
        if count is None:
            return None
        for freed in leaving[:count]:
            self._empty(freed)
        self._held[slot] = adapter
        self.num_loads += 1
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="vlm-serve-adapter")
        self._coming[slot] = self._pool.submit(self._lay_out, adapter.changes)
        self._coming[slot].add_done_callback(lambda _: self.wake())
        return slot

    def _fits(self, adapter: Adapter, leaving: list[int]) -> bool:
        """Tell whether there is room for an adapter without those of some slots."""
        others = [
            held.changes.factor_bytes
            for slot, held in enumerate(self._held)
            if held is not None and slot not in leaving
        ]
        if self._room is None or not others:
            return True
        return adapter.changes.factor_bytes + sum(others) <= self._room

    def _empty(self, slot: int) -> None:
        before, self._held[slot] = self._held[slot], None
        if before is not None:
            self._hold(slot, None)
            before.changes.drop_layout()

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
