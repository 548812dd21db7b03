"""Random traffic with adapters: they come and go under changing names, and are more than slots."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from simulation import Simulation
from symbolic import root_of

from vlm_serve.engine.core.scheduler import Event
from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.engine.features.adapters.slots import AdapterSlots
from vlm_serve.engine.features.adapters.store import AdapterStore, ServedAdapter
from vlm_serve.engine.features.adapters.waiting import AdapterWaiting
from vlm_serve.engine.requests.request import Request
from vlm_serve.errors import ModelNotFoundError
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.linear.low_rank_factors import LowRankChange, Up
from vlm_serve.models.adapters import Adapter, LowRank, Modules
from vlm_serve.models.identity import Digests
from vlm_serve.preprocess.identity.keys import NO_ADAPTER, AdapterIdentity

NAMES = [f"name{each}" for each in range(6)]
CONTENTS = 8
"""Files: some names share one, some names change theirs."""


class _Store(AdapterStore):
    """A store with numbers as folders; every third file changes the tower."""

    def _read(self, path: str | Path) -> tuple[Adapter, Digests]:
        number = int(str(path))
        factor = torch.full((1, 1), float(number))
        module = "blocks.0.attn.qkv" if number % 3 == 0 else "layers.0.mlp.up_proj"
        change = LowRank(factor, factor, 1.0)
        down = torch.full((1 + number % 3, 1), float(number))
        own = LowRankChange(down, torch.ones(len(down)), (Up(0, 0, down.T),))
        return Adapter({module: change}, AdapterChanges({1: own}, 1)), {}


class _Later(Executor):
    """Runs what it is given some steps later, on the thread that says when."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: job(*args, **kwargs)))
        return future

    def step(self) -> None:
        if self._waiting and self._rng.random() < 0.5:
            future, job = self._waiting.pop(0)
            future.set_result(job())


class AdapterSimulation(Simulation):
    """Traffic, mostly with adapters. Takes the options of `Simulation`."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self._choose = random.Random(f"adapters {seed}")
        self._later = _Later(random.Random(f"layouts {seed}"))
        slots = self._choose.choice([1, 2, 3])
        # Adapters have 8 to 24 bytes.
        self._room = random.Random(f"room {seed}").choice([None, 20, 40])
        self.slots = AdapterSlots(slots, self._hold, pool=self._later, room=self._room)
        waiting = AdapterWaiting(self.scheduler.queues, self.slots)
        self.scheduler.hooks.add(waiting, concerns=lambda request: request.adapter is not None)
        self.store = _Store(Modules(), max_rank=8)
        self._users: dict[str, ServedAdapter] = {}
        self._prompts.adapter = self._identity
        for name in NAMES[:4]:
            self._load(name)

    def _hold(self, slot: int, adapter: Adapter | None) -> None:
        own = None
        if adapter is not None:
            own = AdapterIdentity(adapter.digest, adapter.vision_digest)
        self.executor.hold(slot, own)
        self.twin.hold(slot, own)

    def _load(self, name: str) -> None:
        before = len({each.adapter.digest for each in self.store.all()})
        served = self.store.load(LoRA(name, str(self._choose.randrange(CONTENTS))))
        for salt in ("", "tenant"):
            root = root_of(salt, served.identity.whole)
            self.executor.owners[root] = self.twin.owners[root] = served.identity
        shared = len({each.adapter.digest for each in self.store.all()}) == before
        self.counts["shared under two names"] += shared

    def _identity(self) -> AdapterIdentity:
        """Of a random name: some are being unloaded, some prompts were made before."""
        served = self.store.find(self._choose.choice(NAMES))
        return NO_ADAPTER if served is None else served.identity

    def _traffic(self) -> None:
        self._later.step()
        self._check_room()
        if self._choose.random() < 0.05:
            self._come_and_go(self._choose.choice(NAMES))
        super()._traffic()

    def _check_room(self) -> None:
        """Check that no adapters lie beside each other that are too large together."""
        held = [each.changes.factor_bytes for each in self.slots._held if each is not None]
        if self._room is not None and len(held) > 1:
            assert sum(held) <= self._room
            self.counts["beside others in little room"] += 1

    def _come_and_go(self, name: str) -> None:
        served = self.store.find(name)
        if served is not None:
            self.counts["unloaded in use"] += served.users > 0
            self.store.unload(name, timeout=0)
        elif name not in self.store._by_name:
            self.counts["loaded"] += 1
            self._load(name)

    def _with_adapter(self, request: Request) -> Request:
        whole = request.prompt.adapter.whole
        if not whole:
            return request
        served = self.store.begin_use(whole)
        self._users[request.request_id] = served
        self.counts["adapted"] += 1
        return replace(request, adapter=served.adapter)

    def _deliver(self, events: list[Event]) -> None:
        super()._deliver(events)
        for ended in [each for each in self._users if each not in self.clients]:
            self.store.end_use(self._users.pop(ended))

    def _step(self) -> None:
        self._later.step()
        super()._step()

    def _comes_up(self) -> bool:
        return self.slots.busy or super()._comes_up()

    def run(self, steps: int) -> Counter[str]:
        counts = super().run(steps)
        assert not self._users, "requests were lost"
        assert not any(each.users for each in self.store._by_name.values())
        for served in self.store.all():
            self.store.unload(served.name, timeout=0)
        assert not self.store._by_name, "an adapter stays behind its last user"
        try:
            self.store.begin_use("0" * 64)
        except ModelNotFoundError:
            counts["loads into slots"] += self.slots.num_loads
        return counts
