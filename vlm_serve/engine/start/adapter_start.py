"""Makes an engine's adapters at its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from vlm_serve.engine.features.adapters.options import LoRA, changed_experts, named_adapters
from vlm_serve.engine.features.adapters.slots import AdapterSlots
from vlm_serve.engine.features.adapters.store import AdapterStore
from vlm_serve.engine.numerics.arithmetic import factors_dtype
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.engine.steps.ranks.task import ModelSource
from vlm_serve.errors import CheckpointError, ModelNotFoundError
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.models import Model
from vlm_serve.models.adapters import AdapterFile, read_adapter
from vlm_serve.models.adapters.compatibility import check_base, check_files
from vlm_serve.models.identity import Digests
from vlm_serve.options.config import EngineConfig


def make_adapters(
    source: ModelSource,
    model: Model,
    config: EngineConfig,
    executor: LocalExecutor,
    room: int | None = None,
) -> tuple[AdapterStore, AdapterSlots]:
    """Return the adapters that the config names, and the slots for them and for later ones. `room`:
    see `AdapterSlots`; of those that the config names, the largest may be in all slots.

    Raises:
        ConfigError, CheckpointError, ModelNotFoundError: see `named_adapters`, `AdapterStore.load`.
    """
    store = AdapterStore(
        model.modules,
        max_rank=config.max_lora_rank,
        experts=changed_experts(config),
        dtype=factors_dtype(config),
        checked=partial(_check, model, source.path, config.chat_template),
        digests=lambda: model.origin.digests,
    )
    for lora in named_adapters(config):
        with _named(lora):
            store.load(lora)
    if room is not None:
        named = [served.adapter.changes.factor_bytes for served in store.all()]
        room = max(room, config.max_loras * max(named, default=0))
    slots = AdapterSlots(config.max_loras, executor.hold_adapter, _lay_out(source), room=room)
    return store, slots


def _check(model: Model, path: Path, template: str | None, file: AdapterFile) -> Digests:
    """Compare what an adapter's folder has of its model, and return the digests of the tensors
    among that. Raises CheckpointError."""
    check_files(path, file.path, template=template)
    origin, tied = model.origin, model.spec.tied_embeddings
    copied = check_base(origin.path, file, tied=tied, tensors=origin.tensors)
    # The digests of a GGUF file name no tensors; such weights do not change.
    return {name: origin.digests[name] for name in copied & origin.digests.keys()}


@contextmanager
def _named(lora: LoRA) -> Iterator[None]:
    """Put an adapter's name before an error of its folder: the config may have several."""
    try:
        yield
    except (CheckpointError, ModelNotFoundError) as error:
        said = f"lora_modules, {lora.name}: {error.message}"
        raise type(error)(said, param="lora_modules", code=error.code) from error


def _lay_out(source: ModelSource) -> Callable[[AdapterChanges], None]:
    """Return what prepares an adapter for steps: compiled code has a layout of its own, and a GPU
    memory of its own. On CPUs torch takes adapters as they are."""
    if source.compiled:
        return AdapterChanges.lay_out
    if source.device.type == "cpu":
        return lambda _: None
    return lambda changes: changes.place(source.device)


def planned_bytes(config: EngineConfig, *, compiled: bool) -> int:
    """Return the host's bytes of the named adapters: all factors, and those that are laid out.

    Raises:
        ConfigError, CheckpointError, ModelNotFoundError: as `make_adapters`, as far as the files
            tell.
    """
    named = []
    for lora in named_adapters(config):
        with _named(lora):
            named.append(read_adapter(lora.path, factors_dtype(config)))
    laid_out = [file.layout_bytes for file in named]
    factors = sum(file.nbytes for file in named)
    largest = sorted(laid_out, reverse=True)[: config.max_loras]
    return factors + (sum(largest) if compiled else 0)
