"""Main loop of a rank's process: follows the first rank's steps until the engine closes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vlm_serve.cache.tiers.entry import Entry, here
from vlm_serve.engine.requests.plan import SequenceInfo, StepPlan
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.engine.steps.ranks.task import ModelSource, Pools, RankTask
from vlm_serve.models import Model
from vlm_serve.models.adapters import LowRank, changes_of
from vlm_serve.system.log_output import start_logging
from vlm_serve.system.wire import ConnectionLostError, Wire

WITHOUT_REPLY = ("register", "forget", "adapter", "poison")
"""Messages without a reply."""


class Worker:
    """Handles messages: one method for each."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._executor: LocalExecutor | None = None
        self._source: ModelSource | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="vlm-serve-weights")
        self._reading: Future[Model] | None = None

    def load(self, task: RankTask) -> int:
        """Load the rank's part of the model; return the process id."""
        self._model = self._executor = None
        self._model, self._source = task.load(), task.source
        return os.getpid()

    def pools(self, pools: Pools) -> None:
        assert self._model is not None
        self._executor = pools.follower(self._model)

    def unload(self) -> None:
        if self._model is not None:
            self._model.ranks.close()
        self._model = self._executor = self._reading = None

    def read_weights(self, path: Path, tensors: Path | None) -> None:
        """Begin to read other weights, on a thread of their own: steps go on meanwhile.

        Args:
            path: folder of a checkpoint.
            tensors: file of those in the place of some of the folder's.
        """
        assert self._model is not None and self._source is not None
        model, source = self._model, self._source
        self._reading = self._reader.submit(
            lambda: source.load_beside(model, path, load_file(tensors) if tensors else {})
        )

    def weights_read(self) -> bytes | None:
        """Return the fingerprint of the weights that were read; None: they are not read yet. Raise
        whatever reading them has raised."""
        assert self._reading is not None
        return self._reading.result().fingerprint if self._reading.done() else None

    def take_weights(self) -> None:
        """Compute with the weights that were read."""
        assert self._model is not None and self._reading is not None
        self._model.take_weights(self._reading.result())
        self._reading = None

    def drop_weights(self) -> None:
        """Forget the weights that were read."""
        self._reading = None

    def register(self, info: SequenceInfo) -> None:
        self.executor.register(info)

    def forget(self, sequence: int) -> None:
        self.executor.forget(sequence)

    def adapter(self, slot: int, modules: Mapping[str, LowRank] | None) -> None:
        """Put the rank's share of an adapter into a slot; None: empty it."""
        assert self._model is not None
        changes = None if modules is None else changes_of(modules, self._model.modules)
        if changes is not None and self._model.compiled:
            changes.lay_out()
        self.executor.hold_changes(slot, changes)

    def poison(self, blocks: tuple[int, ...], rows: tuple[int, ...]) -> None:
        self.executor.poison_freed(blocks, rows)

    def run(self, step: int, plan: StepPlan) -> None:
        with self._following(step):
            self.executor.follow(plan)

    def measure(self, step: int, most_sequences: int, most_tokens: int) -> None:
        with self._following(step):
            self.executor.measure(most_sequences=most_sequences, most_tokens=most_tokens)

    def read_kv(self, block: int, num_tokens: int) -> bytes:
        return bytes(here(self.executor.pages.read_kv(block, num_tokens)))

    def read_state(self, row: int) -> bytes:
        return bytes(here(self.executor.pages.read_state(row)))

    def write_kv(self, block: int, entry: Entry) -> None:
        self.executor.pages.write_kv(block, self.executor.pages.stage(entry))

    def write_state(self, row: int, entry: Entry) -> None:
        self.executor.pages.write_state(row, self.executor.pages.stage(entry))

    @property
    def executor(self) -> LocalExecutor:
        assert self._executor is not None, "no pools yet"
        return self._executor

    def _following(self, step: int) -> _Following:
        assert self._model is not None
        return _Following(self._model, step)


class _Following:
    """Context of a step that runs together with the other ranks. If this rank fails, the others
    stop waiting for it."""

    def __init__(self, model: Model, step: int) -> None:
        self._ranks, self._step = model.ranks, step

    def __enter__(self) -> None:
        self._ranks.begin(self._step)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._ranks.abort()


def main(descriptor: int) -> None:
    """Run the loop. A reply is (problem or None, value)."""
    start_logging("warning")
    threading.Thread(target=_end_with_the_engine, daemon=True).start()
    wire, worker = Wire(descriptor), Worker()
    while True:
        name, *arguments = wire.receive()
        problem, value = None, None
        try:
            value = getattr(worker, name)(*arguments)
        except Exception as error:
            problem = _sentence(error)
        if name not in WITHOUT_REPLY:
            wire.send(problem, value)


def _sentence(error: Exception) -> str:
    return str(error) or type(error).__name__


def _end_with_the_engine() -> Any:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)  # until the load task sets the number
    try:
        main(int(sys.argv[1]))
    except ConnectionLostError:
        sys.exit(0)
