"""Makes an engine's adapters at its start."""

from __future__ import annotations

from functools import partial

from vlm_serve.config import EngineConfig
from vlm_serve.engine.adapters.options import (
    adapters_impossible,
    changed_experts,
    factors_dtype,
    named_adapters,
)
from vlm_serve.engine.adapters.slots import AdapterSlots
from vlm_serve.engine.adapters.store import AdapterStore
from vlm_serve.engine.local_executor import LocalExecutor
from vlm_serve.engine.ranks.start import ModelSource
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.models import Model
from vlm_serve.models.adapters import read_adapter
from vlm_serve.models.adapters.beside import check_beside


def make_adapters(
    source: ModelSource, model: Model, config: EngineConfig, executor: LocalExecutor
) -> tuple[AdapterStore, AdapterSlots]:
    """Return the adapters that the config names, and the slots for them and for later ones.

    Raises:
        ConfigError, CheckpointError, ModelNotFoundError: see `named_adapters`, `AdapterStore.load`.
    """
    store = AdapterStore(
        model.modules,
        max_rank=config.max_lora_rank,
        experts=changed_experts(config),
        dtype=factors_dtype(config),
        impossible=adapters_impossible(config, source.device),
        checked=partial(check_beside, source.path, template=config.chat_template),
    )
    for each in named_adapters(config):
        store.load(each)
    slots = AdapterSlots(
        config.max_loras,
        executor.hold_adapter,
        AdapterChanges.lay_out if source.compiled else _nothing,
    )
    return store, slots


def planned_bytes(config: EngineConfig, *, compiled: bool) -> int:
    """Return the bytes of the named adapters: of all factors, and of those that are laid out.

    Raises:
        ConfigError, CheckpointError, ModelNotFoundError: as `make_adapters`, as far as the files
            tell.
    """
    named = [read_adapter(each.path, factors_dtype(config)) for each in named_adapters(config)]
    laid_out = [file.layout_bytes for file in named]
    factors = sum(file.nbytes for file in named)
    largest = sorted(laid_out, reverse=True)[: config.max_loras]
    return factors + (sum(largest) if compiled else 0)


def _nothing(_: AdapterChanges) -> None:
    """Lay out nothing: torch takes adapters as they are."""
