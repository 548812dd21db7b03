"""Has sequences wait for a slot of their adapter."""

from __future__ import annotations

from contextlib import suppress

from vlm_serve.engine.core.hooks import Loop
from vlm_serve.engine.core.queues import SequenceQueues
from vlm_serve.engine.features.adapters.slots import AdapterSlots
from vlm_serve.engine.requests.sequence import Sequence
from vlm_serve.errors import EngineClosedError


class AdapterWaiting:
    """Starts sequences once their adapters have slots.

    Args:
        queues: sequences that hold slots.
        slots: the slots.
    """

    def __init__(self, queues: SequenceQueues, slots: AdapterSlots) -> None:
        self._queues = queues
        self.slots = slots

    def attach(self, loop: Loop) -> None:
        """Have the loop plan again when an adapter is ready."""

        def wake() -> None:
            with suppress(EngineClosedError):
                loop.post(lambda: None)

        self.slots.wake = wake

    def is_busy(self) -> bool:
        """Return True while an adapter is being laid out."""
        return self.slots.busy

    def close(self) -> None:
        """End the thread that lays adapters out."""
        self.slots.close()

    def plan_open(self, room: int) -> int:
        """Put adapters that are ready into their slots; take no token."""
        self.slots.begin_pass()
        return 0

    def may_start(self, sequence: Sequence) -> bool:
        """Return False while a sequence has to wait for its adapter. Raise as
        `AdapterSlots.may_start` does."""
        if self.slots.may_start(sequence, self._queues.holders):
            return True
        if self.slots.missed:
            self._queues.reclaim("adapters")
        return False
