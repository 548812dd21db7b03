"""Loads a model on one rank or on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from vlm_serve.engine.steps.ranks.process import START_SECONDS, RankProcesses
from vlm_serve.engine.steps.ranks.task import ModelSource, RankTask, Rendezvous
from vlm_serve.errors import ConfigError, EngineError
from vlm_serve.kernels.ranks.shared import SharedMemory
from vlm_serve.models import Model, ModelSpec
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import format_size
from vlm_serve.system.private_files import TemporaryFolder
from vlm_serve.system.wire import ConnectionLostError, ReplyTimeoutError


def load(
    source: ModelSource, config: EngineConfig, processes: RankProcesses | None = None
) -> tuple[Model, RankProcesses | None]:
    """Load the model. Return the first rank's part and the processes of the other ranks, if any.

    Args:
        source: the model.
        config: options.
        processes: existing processes with nothing loaded (tests); None starts new ones.

    Raises:
        ConfigError: more ranks than GPUs.
        EngineError: a rank cannot be started, or fails; no process is left behind.
        CheckpointError, BuildError: as from `load_model`.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return source.load(), None
    devices = _devices(source.device, size)
    owned = processes is None
    processes = processes or RankProcesses(size - 1)
    threads = config.threads or max(1, torch.get_num_threads() // size)
    try:
        with _rendezvous(source, config) as rendezvous:
            tasks = [
                RankTask(rank, size, rendezvous, replace(source, device=device), threads)
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


def _devices(device: torch.device, size: int) -> list[torch.device]:
    """Return the device of each rank, consecutive GPUs from the named one."""
    if device.type == "cpu":
        return [device] * size
    first, count = device.index or 0, torch.cuda.device_count()
    if first + size > count:
        behind = f" from cuda:{first} on" if first else ""
        raise ConfigError(
            f"tensor_parallel_size is {size}, but this machine has {count - first} GPUs{behind}",
            param="tensor_parallel_size",
        )
    return [torch.device("cuda", first + rank) for rank in range(size)]


@contextmanager
def _rendezvous(source: ModelSource, config: EngineConfig) -> Iterator[Rendezvous]:
    """Create the place where ranks meet: shared memory for compiled steps on one host, else the
    store of a process group. It is private, and its file is gone as soon as all ranks have
    joined."""
    size, limit = config.tensor_parallel_size, config.stall_timeout
    if source.compiled:
        needed = slot_bytes(source.spec, config)
        try:
            memory = SharedMemory.create(size, needed)
        except (OSError, OverflowError, ValueError, MemoryError) as error:
            raise ConfigError(
                f"there is no shared memory of {size} x {format_size(needed)} for what ranks tell "
                "each other: lower max_num_batched_tokens",
                param="max_num_batched_tokens",
            ) from error
        try:
            yield Rendezvous(memory.path, memory.slot_bytes, limit)
        finally:
            memory.unlink()
        return
    try:
        folder = TemporaryFolder("vlm-serve-ranks-")
    except OSError as error:
        raise EngineError(f"there is no folder for the ranks' rendezvous: {error}") from error
    try:
        yield Rendezvous(Path(folder.path, "store"), 0, limit)
    finally:
        folder.remove()


def slot_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Return the bytes of a rank's slot. It holds all tokens of the largest step, or a row of its
    logits."""
    drafts = 0 if config.speculative == "off" else config.speculative_tokens + 1
    tokens = config.max_num_batched_tokens + config.max_num_seqs * drafts
    return 4 * max(tokens * spec.hidden_size, -(-spec.vocab_size // config.tensor_parallel_size))
