"""Prepares an engine whose weights may change."""

from __future__ import annotations

from functools import partial

from vlm_serve.engine.features.new_weights import NewWeights
from vlm_serve.engine.features.weights import WeightReader
from vlm_serve.engine.steps.memory import free_host_memory
from vlm_serve.engine.steps.ranks.process import RankProcesses
from vlm_serve.engine.steps.ranks.task import ModelSource
from vlm_serve.errors import ConfigError
from vlm_serve.models import Model
from vlm_serve.models.gguf.folder import gguf_files
from vlm_serve.models.weight_sizes import WeightBytes
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import format_size


def make_reader(
    source: ModelSource,
    model: Model,
    processes: RankProcesses | None,
    config: EngineConfig,
    needed: int,
) -> WeightReader | None:
    """Return what reads other weights; None: the options do not allow it. `needed`: bytes of a
    rank's other weights.

    Raises ConfigError if such weights, or such an engine, cannot be updated.
    """
    if not config.allow_weight_updates:
        return None
    unsupported = {
        "a GPU": source.device.type != "cpu",
        "GGUF files": gguf_files(source.path) is not None,
    }
    for what, found in unsupported.items():
        if found:
            raise ConfigError(
                f"allow_weight_updates is not possible with {what}", param="allow_weight_updates"
            )
    ask = partial(processes.ask, seconds=config.stall_timeout) if processes else None
    new = NewWeights(model, partial(source.load_beside, model), ask)
    return WeightReader(new, partial(_check_room, needed * config.tensor_parallel_size))


def update_bytes(config: EngineConfig, weights: WeightBytes) -> int:
    """Return what each rank needs beside everything else while its weights change: a second set."""
    return weights.in_memory if config.allow_weight_updates else 0


def _check_room(model: int, extra: int) -> None:
    needed, free = model + extra, free_host_memory()
    if needed > free:
        raise ConfigError(
            f"new weights take {format_size(needed)} beside the old ones, but {format_size(free)} "
            "of memory are free"
        )
