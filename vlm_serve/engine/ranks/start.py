"""Loads a model, on one rank or on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from vlm_serve.config import EngineConfig
from vlm_serve.engine.arithmetic import Arithmetic
from vlm_serve.engine.ranks.process import START_SECONDS, RankProcesses
from vlm_serve.engine.ranks.task import RankTask, Rendezvous
from vlm_serve.engine.ranks.wire import ConnectionLostError, ReplyTimeoutError
from vlm_serve.errors import ConfigError, EngineError
from vlm_serve.kernels.ranks.shared import SharedMemory
from vlm_serve.models import Model, ModelSpec, load_model
from vlm_serve.temporary_folder import TemporaryFolder


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What is to be loaded; see `load_model`."""

    path: Path
    spec: ModelSpec
    arithmetic: Arithmetic
    device: torch.device
    compiled: bool
    drafts: bool = False


def load(
    source: ModelSource, config: EngineConfig, processes: RankProcesses | None = None
) -> tuple[Model, RankProcesses | None]:
    """The first rank's part of the model, and the processes that have loaded theirs, if there are.

    Args:
        what: the model.
        config: options.
        processes: that are there already and have nothing loaded (tests); else they are started.

    Raises:
        ConfigError: more ranks than GPUs.
        EngineError: a rank cannot be started, or fails. None is left behind then.
        CheckpointError, BuildError: as from `load_model`.
    """
    types, size = source.arithmetic.types, config.tensor_parallel_size
    if size == 1:
        model = load_model(
            source.path,
            types.weights,
            source.device,
            compute_dtype=types.compute,
            compiled=source.compiled,
            drafts=source.drafts,
            bits=source.arithmetic.bits,
            dynamic=source.arithmetic.dynamic,
        )
        return model, None
    devices = _devices(source.device, size)
    owned = processes is None
    processes = processes or RankProcesses(size - 1)
    threads = config.threads or max(1, torch.get_num_threads() // size)
    try:
        with _rendezvous(source, config) as rendezvous:
            tasks = [
                RankTask(
                    rank,
                    size,
                    rendezvous,
                    source.path,
                    source.arithmetic,
                    device,
                    source.compiled,
                    threads,
                )
                for rank, device in enumerate(devices)
            ]
            for process, task in zip(processes, tasks[1:], strict=True):
                process.send("load", task)
            model = tasks[0].load()
            processes.receive(START_SECONDS)
    except BaseException as error:
        if owned:
            processes.close()
        if isinstance(error, ReplyTimeoutError):
            raise EngineError(f"{error} has not started within {START_SECONDS:g} s") from None
        if isinstance(error, ConnectionLostError):
            raise EngineError(f"{error} before it had started") from None
        raise
    return model, processes


def _devices(device: torch.device, size: int) -> list[str]:
    """One for each rank."""
    if device.type == "cpu":
        return ["cpu"] * size
    count = torch.cuda.device_count()
    if size > count:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but this machine has {count} GPUs",
            param="tensor_parallel_size",
        )
    return [f"cuda:{rank}" for rank in range(size)]


@contextmanager
def _rendezvous(source: ModelSource, config: EngineConfig) -> Iterator[Rendezvous]:
    """Compiled steps of one host meet in shared memory, all else in a process group. Nobody else
    can come, and when all ranks are there no place is left."""
    size, limit = config.tensor_parallel_size, config.stall_timeout
    if source.compiled:
        memory = SharedMemory.create(size, slot_bytes(source.spec, config))
        try:
            yield Rendezvous(memory.path, memory.slot_bytes, limit)
        finally:
            memory.forget()
        return
    try:
        folder = TemporaryFolder("vlm-serve-ranks-")
    except OSError as error:
        raise EngineError(f"the ranks have nowhere to meet: {error}") from error
    try:
        yield Rendezvous(Path(folder.path, "store"), 0, limit)
    finally:
        folder.remove()


def slot_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Of a rank's slot: a step's tokens, as many as there can be, and a row of its logits."""
    drafts = 0 if config.speculative == "off" else config.speculative_tokens + 1
    tokens = config.max_num_batched_tokens + config.max_num_seqs * drafts
    return 4 * max(tokens * spec.hidden_size, -(-spec.vocab_size // config.tensor_parallel_size))
