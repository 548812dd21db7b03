"""Prepares an engine whose weights may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from vlm_serve.engine.features.weights import WeightReader
from vlm_serve.engine.steps.memory import free_host_memory
from vlm_serve.engine.steps.ranks.task import ModelSource
from vlm_serve.errors import ConfigError
from vlm_serve.models import Model
from vlm_serve.models.gguf.folder import gguf_files
from vlm_serve.models.weight_sizes import WeightBytes
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import format_size


def make_reader(
    source: ModelSource, model: Model, config: EngineConfig, weights: WeightBytes
) -> WeightReader | None:
    """Return what reads other weights; None: the options do not allow it.

    Raises ConfigError if such weights, or such an engine, cannot be updated.
    """
    if not config.allow_weight_updates:
        return None
    unsupported = {
        "a GPU": source.device.type != "cpu",
        "several ranks": config.tensor_parallel_size > 1,
        "GGUF files": gguf_files(source.path) is not None,
        "quantised weights": bool(model.quantised) or source.arithmetic.bits is not None,
    }
    for what, found in unsupported.items():
        if found:
            raise ConfigError(
                f"allow_weight_updates is not possible with {what}", param="allow_weight_updates"
            )
    needed = weights.projections + weights.table + weights.others
    return WeightReader(model, source.path, partial(_load, source), partial(_check_room, needed))


def _load(source: ModelSource, path: Path, tensors: Mapping[str, torch.Tensor]) -> Model:
    return replace(source, path=path).load(spec=source.spec, tensors=tensors)


def _check_room(model: int, extra: int) -> None:
    needed, free = model + extra, free_host_memory()
    if needed > free:
        raise ConfigError(
            f"new weights take {format_size(needed)} beside the old ones, but {format_size(free)} "
            "of memory are free"
        )
