"""A stand-in for a device that works behind the host, as a GPU does.

Copies and replays of captured steps queue up. They run, in their order, when somebody waits for
them, and not before: memory that a copy reads is read as late as a device may read it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from step_graphs import Repeating, with_graphs

from vlm_serve.engine import local_executor
from vlm_serve.engine.graph_device import Step
from vlm_serve.engine.sampler import sample
from vlm_serve.engine.tier_transfer import TensorTransfer
from vlm_serve.models import Model


class QueuedDevice(Repeating):
    """Queues copies and captured steps; everything else waits for the queue and runs at once.

    Args:
        forgets_events: break the device's promise: nobody waits for a copy before its source is
            filled again. A test that does not notice this sees nothing.

    Attributes:
        longest: most pieces of work that were queued at one time.
    """

    def __init__(self, *, forgets_events: bool = False) -> None:
        super().__init__()
        self.longest = 0
        self._queue: deque[Step] = deque()
        self._working = False
        self._forgets_events = forgets_events

    def capture(self, step: Step) -> Step:
        replay = super().capture(step)
        return lambda: self._add(replay)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Step:
        done = False

        def copy() -> None:
            nonlocal done
            target.copy_(source)
            done = True

        def wait() -> None:
            while not done and not self._forgets_events:
                self._work()

        self._add(copy)
        return wait

    def synchronize(self) -> None:
        """Do all that is queued; not from within that, where the order is kept already."""
        while self._queue and not self._working:
            self._work()

    def _work(self) -> None:
        self._working = True
        try:
            self._queue.popleft()()
        finally:
            self._working = False

    def _add(self, work: Step) -> None:
        self._queue.append(work)
        self.longest = max(self.longest, len(self._queue))


def with_queue(monkeypatch: pytest.MonkeyPatch, device: QueuedDevice) -> None:
    """Has engines run captured steps on this device. Steps of other kinds, what cache tiers read
    and write, and all that reads logits wait for it, as they would in the same stream."""
    with_graphs(monkeypatch, lambda: device)

    def behind(function: Any) -> Any:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            device.synchronize()
            return function(*args, **kwargs)

        return waiting

    def sampling(logits: Any, tasks: Any, *args: Any) -> Any:
        # Without tasks nothing is read back, and the host goes on.
        if tasks:
            device.synchronize()
        return sample(logits, tasks, *args)

    monkeypatch.setattr(local_executor, "sample", sampling)
    for name in ("logprob_rows", "copy_rows", "copy_kv_rows"):
        monkeypatch.setattr(local_executor, name, behind(getattr(local_executor, name)))
    methods = {
        Model: ("forward", "fold", "draft"),
        TensorTransfer: ("read_kv", "read_state", "write_kv", "write_state"),
        local_executor.LocalExecutor: ("poison_freed",),
    }
    for owner, names in methods.items():
        for name in names:
            monkeypatch.setattr(owner, name, behind(getattr(owner, name)))
