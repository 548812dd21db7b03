"""The symbolic executor on a device behind the host: its plans arrive in captured steps' tables.

A plan is written into the tables of a step, as bytes, and goes to the device through the engine's
own ring of host buffers. What the device computes it reads there, when it comes to it. If the host
fills a buffer too early, another plan is computed or none at all.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from queued_device import QueuedDevice
from symbolic import SymbolicExecutor

from vlm_serve.engine.requests.plan import SequenceInfo, StepOutput, StepPlan
from vlm_serve.engine.steps.step_tables import HostRing, StepTables, Table
from vlm_serve.preprocess.identity.keys import AdapterIdentity, WeightsIdentity

_SMALLEST = 1 << 12
"""Bytes of the smallest tables; others have powers of two times as many."""


class QueuedSymbolic:
    """Executes plans on digests, as late as a device may.

    Args:
        seed: see `FakeDevice`.
        num_blocks, num_rows, block_size, rng, options: see `SymbolicExecutor`.
    """

    def __init__(
        self,
        seed: int,
        num_blocks: int,
        num_rows: int,
        block_size: int,
        rng: random.Random,
        **options: Any,
    ) -> None:
        self.device = QueuedDevice(seed)
        self._inner = SymbolicExecutor(num_blocks, num_rows, block_size, rng, **options)
        self._ring = HostRing(self.device)
        self._tables: dict[int, StepTables] = {}
        self._reading: dict[int, bool] = {}
        self.owners = self._inner.owners
        self.fail_next = False
        self.strike: int | None = None

    def read_kv(self, block: int, num_tokens: int) -> list[bytes]:
        self.device.synchronize()
        return self._inner.read_kv(block, num_tokens)

    def read_state(self, row: int) -> bytes:
        self.device.synchronize()
        return self._inner.read_state(row)

    def write_kv(self, block: int, digests: list[bytes]) -> None:
        self._queue(partial(self._inner.write_kv, block, digests))

    def write_state(self, row: int, digest: bytes) -> None:
        self._queue(partial(self._inner.write_state, row, digest))

    def embedding(self, slot: int) -> bytes | None:
        self.device.synchronize()
        return self._inner.embedding(slot)

    def poison(self, blocks: Iterable[int] = (), rows: Iterable[int] = ()) -> None:
        self._queue(partial(self._inner.poison, blocks, rows))

    def hold(self, slot: int, adapter: AdapterIdentity | None) -> None:
        self._queue(partial(self._inner.hold, slot, adapter))

    def change(self, weights: WeightsIdentity, kept: Mapping[int, int]) -> None:
        self._queue(partial(self._inner.change, weights, kept))

    def restart(self, sequence: int) -> None:
        self._queue(partial(self._inner.restart, sequence))

    def fork(self, sequence: int, parent: int) -> None:
        self._queue(partial(self._inner.fork, sequence, parent))

    def release(self) -> None:
        self._queue(self._inner.release)

    def register(self, info: SequenceInfo) -> None:
        self._reading[info.sequence] = info.params.return_routed_experts
        self._queue(partial(self._inner.register, info))

    def forget(self, sequence: int) -> None:
        del self._reading[sequence]
        self._queue(partial(self._inner.forget, sequence))

    def run(self, plan: StepPlan) -> StepOutput:
        """Queue a plan; wait for it if something is read back, as `LocalExecutor` does."""
        done: list[StepOutput] = []
        tables = self._sent(pickle.dumps(plan))
        if self.fail_next:
            self.device.synchronize()
            self._inner.fail_next, self._inner.strike = True, self.strike
            self.fail_next, self.strike = False, None
            return self._inner.run(_arrived(tables))
        self._queue(lambda: done.append(self._inner.run(_arrived(tables))))
        if not self._reads_back(plan):
            return StepOutput({}, awaited=False)
        self.device.synchronize()
        return done[0]

    def _reads_back(self, plan: StepPlan) -> bool:
        return any(
            item.samples or item.reported_end > item.reported_start or self._reading[item.sequence]
            for item in plan.slices
        )

    def _sent(self, data: bytes) -> StepTables:
        size = max(_SMALLEST, 1 << (len(data) - 1).bit_length())
        if size not in self._tables:
            parts = {"size": Table(torch.int64, (1,)), "bytes": Table(torch.uint8, (size,))}
            self._tables[size] = StepTables({"plan": parts}, self._ring, torch.device("cpu"))
        tables = self._tables[size]
        staged = tables.stage()["plan"]
        staged["size"].fill_(len(data))
        staged["bytes"][: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tables.send()
        return tables

    def _queue(self, work: Any) -> None:
        self.device.device.queue(work)


def _arrived(tables: StepTables) -> StepPlan:
    plan = tables.fixed["plan"]
    data = plan["bytes"][: int(plan["size"])].numpy().tobytes()
    found = pickle.loads(data)
    assert isinstance(found, StepPlan)
    return found
