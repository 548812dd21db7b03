"""Random traffic under weights that change between steps, go back and forth, and share towers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from simulation import Simulation

from vlm_serve.engine.features.new_weights import Call, NewWeights
from vlm_serve.engine.features.table import Options
from vlm_serve.engine.features.weights import WeightReader, WeightUpdates
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.models import Model
from vlm_serve.preprocess.identity.keys import WeightsIdentity
from vlm_serve.preprocess.identity.prompt import Prompt


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


EPOCHS = [WeightsIdentity(_digest(f"whole {n}"), _digest(f"tower {n // 2}")) for n in range(4)]
"""Two have the same tower each."""


class _Weights:
    """What stands for a model: nothing but the names of its weights.

    Args:
        epoch: of `EPOCHS`.
        told: is called with the weights that take the place of these.
    """

    def __init__(self, epoch: int, told: Callable[[WeightsIdentity], None]) -> None:
        self._told = told
        self.identity = EPOCHS[epoch]

    @property
    def fingerprint(self) -> bytes:
        return self.identity.whole

    @property
    def tower_fingerprint(self) -> bytes:
        return self.identity[1]

    def drop_weights(self) -> None:
        """Keep the names alone: no step may run."""

    def take_weights(self, other: _Weights) -> None:
        self.identity = other.identity
        self._told(self.identity)


class _Reader:
    """A reader whose folders are numbers."""

    def __init__(self, told: Callable[[WeightsIdentity], None]) -> None:
        self.model = _Weights(0, told)
        load = cast("Any", lambda path, tensors: _Weights(int(path.name), told))
        self.new = NewWeights(cast("Model", self.model), load)

    def from_folder(self, path: Path, call: Call, below: Path | None) -> Model:
        return self.new.read(path, {}, call)

    def again(self, call: Call) -> Model:
        path = Path(str(EPOCHS.index(self.model.identity)))
        return self.new.read(path, {}, call)


class WeightSimulation(Simulation):
    """Traffic with updates between steps. Takes the options of `Simulation`."""

    def __init__(self, seed: int, **options: Any) -> None:
        self._changes = random.Random(f"weights {seed}")
        self._rate = self._changes.choice([0.005, 0.03, 0.1])
        self._reader = _Reader(self._tell)
        super().__init__(seed, **options)
        updates = self.features.get(WeightUpdates)
        assert updates is not None
        updates.attach(cast("Any", self))
        self._updates = updates
        self._tell(EPOCHS[0])

    def _feature_options(self) -> Options:
        return replace(super()._feature_options(), weights=cast("WeightReader", self._reader))

    def _tell(self, weights: WeightsIdentity) -> None:
        queues = self.scheduler.queues
        self._kept = {
            each.number: each.num_computed
            for each in (*queues.running, *queues.waiting)
            if each.held is not None
        }
        self.executor.change(weights, self._kept)
        self.twin.change(weights, self._kept)

    # What an update knows of the loop.

    @property
    def groups(self) -> list[SequenceGroup]:
        return [client.group for client in self.clients.values()]

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def has_idle_callers(self) -> bool:
        return self.scheduler.has_idle_callers

    def abort(self, request_id: str) -> None:
        self._deliver(self.scheduler.end(self.clients[request_id].group))

    def _traffic(self) -> None:
        super()._traffic()
        if self._under_way is None and self._changes.random() < self._rate:
            self._update()

    def _update(self) -> None:
        epoch, abort = self._changes.randrange(len(EPOCHS)), self._changes.random() < 0.1
        begun = {group for group in self.groups if any(s.num_generated for s in group.sequences)}
        # A prompt of which something was computed is looked up again.
        again = [group for group in self.groups if group.report is not None and group not in begun]
        self.counts["most hits"] += len(again)
        self._updates.update(str(epoch), lambda swap: swap(), abort=abort)
        for client in self.clients.values():
            client.under(self._updates.identity.whole, self._kept)
        self._forget_removed()
        self.cache.check()
        self.counts["updates"] += 1
        self.counts["updates amid answers"] += bool(begun) and not abort

    def _keyed(self, prompt: Prompt) -> Prompt:
        """Some were prepared under other weights."""
        weights = self._updates.identity
        if self._changes.random() < 0.3:
            weights = self._changes.choice(EPOCHS)
        return replace(prompt, keys=prompt.keys.under(weights))
