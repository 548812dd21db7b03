"""Memory that steps take beside weights and pools: measured on a GPU before the pools take theirs,
and planned without one.

Activations, logits and the vision tower's patches live in torch's allocator, beside the pools. So
the largest step and the largest picture run once on small pools.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlm_serve.engine.features.adapters.options import (
    changed_experts,
    named_adapters,
    serves_adapters,
)
from vlm_serve.engine.numerics.arithmetic import Types, factors_dtype
from vlm_serve.engine.start.sampling_memory import fullest_crowd
from vlm_serve.engine.start.warm_up import warm_up
from vlm_serve.engine.steps.adapter_table import SlotSizes, idle_adapter, most_bytes
from vlm_serve.engine.steps.memory import StepMemory
from vlm_serve.engine.steps.pixel_copies import sent_bytes
from vlm_serve.engine.steps.ranks.task import ModelSource
from vlm_serve.engine.steps.step_sizes import LARGEST, CapturedRows
from vlm_serve.engine.steps.tier_copies import room_bytes
from vlm_serve.engine.steps.tower_graphs import most_tiles, patch_sizes
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import Launch, Target, record_launches
from vlm_serve.models import Model, ModelSpec
from vlm_serve.models.adapters import Modules, place, read_adapter
from vlm_serve.models.batch import ForwardBatch
from vlm_serve.models.cache_layout import CacheTensors, Unit
from vlm_serve.models.weight_sizes import unread_model
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.media.processors import image_config

REPORTED_LOGITS_BYTES = 256 << 20
"""Maximum bytes of prompt logits that one step computes for requested prompt log-probabilities."""
_TARGET = Target("cuda", 90)
"""Whose launches are prepared. Scratch memory is much the same on all."""
_GRAIN = 512
"""torch's CUDA allocator hands out multiples of this."""


def try_steps(
    source: ModelSource, model: Model, config: EngineConfig, *, with_graphs: bool
) -> StepMemory | None:
    """Measure what steps take and compile what serving needs, on one GPU; return None elsewhere.

    Raises:
        ConfigError: a step does not fit.
    """
    if source.device.type != "cuda" or config.tensor_parallel_size > 1:
        return None
    memory = measure_step_memory(
        model,
        source.arithmetic.types,
        config,
        span_tokens=largest_span(source.path, source.spec, config.max_num_batched_tokens),
        logit_rows=config.max_num_seqs + reported_tokens(config, source.spec),
        with_graphs=with_graphs,
    )
    warm_up(model, source.arithmetic.types, config)
    return _with_rest(memory, model, source.arithmetic.types, config, with_graphs=with_graphs)


def planned_step_memory(
    model: ModelSpec, path: Path, types: Types, config: EngineConfig, *, with_graphs: bool
) -> StepMemory | None:
    """Return what a start on a GPU would measure, without a GPU and without weights: the same steps
    on the device "meta". None if Triton is not installed.

    Args:
        model: the model; quantised weights count as dense ones, whose activations are the same.
        path: its checkpoint, or its config.json alone.
        types: of weights, activations and pools.
        config: options, with a block size.
        with_graphs: see `measure_step_memory`.
    """
    tokens = config.max_num_batched_tokens
    known = model.vision is None or path.is_dir()
    unread = unread_model(model, types.weights, types.compute)
    try:
        memory = measure_step_memory(
            unread,
            types,
            config,
            span_tokens=largest_span(path, model, tokens) if known else tokens,
            logit_rows=config.max_num_seqs + reported_tokens(config, model),
            with_graphs=with_graphs,
        )
    except KernelArgumentError:
        return None
    return _with_rest(memory, unread, types, config, with_graphs=with_graphs)


def _with_rest(
    memory: StepMemory, model: Model, types: Types, config: EngineConfig, *, with_graphs: bool
) -> StepMemory:
    """Return the same with what adapters and lower tiers keep, which no step allocates."""
    adapters, tiers = _adapter_bytes(model, config, with_graphs=with_graphs), 0
    stores = config.host_cache_memory, config.disk_cache_path, config.shared_store
    if config.enable_prefix_caching and any(stores):
        layout = model.spec.cache_layout(mtp=model.drafts)
        units: tuple[Unit, ...] = ("block", "row")
        sizes = (layout.num_bytes(unit, types.pools, config.block_size or 0) for unit in units)
        tiers = room_bytes(max(sizes))
    return replace(memory, adapters=adapters, tiers=tiers)


def _adapter_bytes(model: Model, config: EngineConfig, *, with_graphs: bool) -> int:
    """Return the bytes of adapters' slots, and of their table for captured steps."""
    size = adapter_slot_bytes(config, most_bytes(model.modules, config), model.modules)
    if with_graphs and serves_adapters(config):
        size += SlotSizes.of_config(model.modules, config).nbytes
    return size


def largest_span(checkpoint: Path, model: ModelSpec, step_tokens: int) -> int:
    """Return the most placeholder tokens that a step encodes; 0 without a vision tower.

    These are as many as a step has tokens, or those of one picture that is larger.
    """
    if model.vision is None:
        return 0
    if model.family.slice_start is not None or model.family.tile is not None:
        return step_tokens  # Its pictures are cut into slices of some hundred tokens.
    picture = image_config(checkpoint)
    if picture is None:
        return step_tokens
    return max(step_tokens, picture.max_pixels // picture.factor**2)


def reported_tokens(config: EngineConfig, model: ModelSpec) -> int:
    """Return how many tokens of a step may report log-probabilities of the prompt."""
    assert config.block_size is not None
    return max(config.block_size, REPORTED_LOGITS_BYTES // (4 * model.vocab_size))


def measure_step_memory(
    model: Model,
    types: Types,
    config: EngineConfig,
    *,
    span_tokens: int,
    logit_rows: int,
    with_graphs: bool,
) -> StepMemory:
    """Run the largest step, the largest picture and the largest captured step and picture on a GPU
    or "meta".

    Args:
        model: the model, loaded.
        types: of pools.
        config: options, with a block size.
        span_tokens: placeholder tokens that a step may encode; 0 without a vision tower.
        logit_rows: tokens of a step whose logits may be wanted.
        with_graphs: True if short steps are captured.

    Raises:
        ConfigError: such a step does not fit beside the weights.
    """
    device, tokens = model.device, config.max_num_batched_tokens
    size, captured = config.block_size, CapturedRows.of(config)
    assert size is not None
    few, rows = captured.most_tokens, captured.most_logits
    adapter = idle_adapter(model.modules, config)
    try:
        with torch.inference_mode(), launching_on(device):
            caches = _small_pools(model, types, -(-max(tokens, few) // size), size)
            if adapter is not None:
                adapter.place(device)
            forward = partial(_forward, model, caches, config.chunk_size, adapter)
            text = _peak(device, forward(tokens, logit_rows))
            # What lies between a step's inputs and results is shared by all sizes, but for what
            # their allocations leave between each other. The results are kept.
            shared = 2 * _peak(device, forward(few, rows)) if with_graphs else 0
            graphs = shared
            if with_graphs:
                hidden = model.spec.hidden_size * model.dtype.itemsize
                graphs += captured.result_bytes(model.columns, hidden)
                blocks = -(-_longest(model.spec, config) // size)
                graphs += captured.table_bytes(blocks, 1 if adapter is None else 2)
            if with_graphs and adapter is not None:
                # The sets with adapters have decode steps and drafts alone.
                changed = max(min(few, LARGEST), captured.sequences, captured.draft_rows)
                graphs += _peak(device, forward(changed, rows))
            media = _peak(device, _encode(model, span_tokens, adapter)) if span_tokens else 0
            if (vision := model.spec.vision) is not None:
                media += sent_bytes(span_tokens * vision.merge_size**2 * vision.patch_dim)
            patches = patch_sizes(model.spec, config)
            if with_graphs and patches:
                # Graphs of the tower and of steps share what lies between inputs and results.
                tower, kept = _fixed_tower(model, patches[-1])
                graphs += max(0, 2 * _peak(device, tower) - shared) + _peak(device, kept)
            sampling = _sampling(model, config) if model.pooled is None else 0
            parts = partial_sums(model.spec, config)
            model.unbind()
            del caches
            if device.type == "cuda":
                torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"a step of {tokens} tokens does not fit beside the weights on {device}: lower "
            "max_num_batched_tokens",
            param="max_num_batched_tokens",
        ) from None
    graphs += parts if with_graphs else 0
    return StepMemory(text + parts, media, graphs, sampling=sampling)


def _sampling(model: Model, config: EngineConfig) -> int:
    """Return what sampling takes beside the logits. On a GPU its kernels are compiled by that."""
    shape = config.max_num_seqs, model.columns
    logits = torch.zeros(shape, dtype=torch.float32, device=model.device)
    return _peak(model.device, fullest_crowd(logits, config.max_logprobs))


def partial_sums(model: ModelSpec, config: EngineConfig) -> int:
    """Return the most bytes of attention's partial sums in a step: of as many sequences as may run,
    with the longest contexts, or of as many prompt tokens behind them. Layers and kinds of tokens
    share them. Drafts of captured steps are tokens like others."""
    keys, captured = _longest(model, config), CapturedRows.of(config)
    decodes = max(config.max_num_seqs, captured.draft_rows)
    tokens = max(config.max_num_batched_tokens, captured.prompt)
    kinds = (decodes, 0), (tokens, max(config.max_num_seqs, captured.prompt_logits))
    mixers = {mixer for layer in model.layers for mixer in layer.mixers}
    return max(mixer.sums_bytes(*kind, keys) for mixer in mixers for kind in kinds)


def _longest(model: ModelSpec, config: EngineConfig) -> int:
    """Return the most tokens of a sequence, unless the cache allows for fewer."""
    return config.max_model_len or model.max_position_embeddings


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """Return how many bytes a run allocates at most, beyond those at its beginning."""
    if device.type == "meta":
        return peak_of(run)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _small_pools(model: Model, types: Types, blocks: int, block_size: int) -> CacheTensors:
    layout = model.spec.cache_layout(model.ranks.size, mtp=model.drafts)
    rows = 1 if layout.has_state else 0
    return layout.allocate(blocks, rows, block_size, types.pools, model.device, num_updates=rows)


def _forward(
    model: Model,
    caches: CacheTensors,
    chunk: int,
    adapter: AdapterChanges | None,
    tokens: int,
    logit_rows: int,
) -> Callable[[], object]:
    """Return a run of one cold slice of that many tokens, all with an adapter if there is one."""
    batch = ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(tokens).expand(3, -1),
        slots=torch.arange(tokens),
        prefill=PrefillMeta(
            cu_seqlens=(0, tokens),
            starts=(0,),
            block_tables=(tuple(range(-(-tokens // caches.block_size))),),
            src_rows=(-1,),
            dst_rows=(0 if caches.num_rows else -1,),
            chunk_ends=((*range(chunk, tokens, chunk), tokens),),
        ),
        logit_rows=torch.arange(max(0, tokens - logit_rows), tokens),
        changes=RowChanges.of_all(adapter, tokens),
    ).to(model.device)

    def run() -> None:
        output = model.forward(batch, caches)
        # As sampling does with all rows.
        output.logits.argmax(-1)

    return run


def _encode(model: Model, span_tokens: int, adapter: AdapterChanges | None) -> Callable[[], object]:
    """Return a run of the tower over one picture of at least that many placeholder tokens, with an
    adapter if there is one."""
    vision = model.spec.vision
    assert vision is not None
    merge = vision.merge_size
    high = math.isqrt(span_tokens)
    wide = -(-span_tokens // high)
    grid = 1, merge * high, merge * wide

    def run() -> None:
        pixels = torch.zeros(grid[1] * grid[2], vision.patch_dim)
        model.encode_media(pixels, [grid], [merge], changes=adapter)

    return run


def _fixed_tower(model: Model, patches: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a run of the tower over fixed inputs of so many patches, and one that allocates only
    what its graphs keep: inputs and results."""
    tiles = torch.zeros(most_tiles(patches), 3, dtype=torch.int32, device=model.device)

    def keep() -> tuple[object, torch.Tensor]:
        tower = model.fixed_tower(patches)
        assert tower is not None
        shape = patches // tower.area, model.spec.embedding_width
        return tower, torch.empty(shape, dtype=model.dtype, device=model.device)

    def run() -> None:
        tower = model.fixed_tower(patches)
        assert tower is not None
        tower.run(patches, tiles)

    return run, keep


def peak_of(run: Callable[[], object]) -> int:
    """Return the most bytes held by a run at a time, beyond those at its beginning.

    Triton's kernels are not run; what they write to is allocated by torch, and counts. Workspaces
    of libraries do not.

    Raises:
        KernelArgumentError: Triton is not installed.
    """
    with record_launches(_TARGET) as launches:
        allocations = _Allocations(launches)
        with allocations:
            run()
    return allocations.peak


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._launches = launches
        self._living: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A recorded launch holds its arguments, which are free by then.
        self._launches.clear()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in _tensors([args, kwargs])}
        self._living = [allocation for allocation in self._living if not _expired(allocation[0])]
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if tensor.device.type == "meta" and storage._cdata not in known:
                size = -(-storage.nbytes() // _GRAIN) * _GRAIN
                self._living.append((_weak(storage), size))
                known.add(storage._cdata)
        self.peak = max(self.peak, sum(size for _, size in self._living))
        return result


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _expired(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an operation's arguments or results."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def adapter_slot_bytes(config: EngineConfig, most: int = 0, modules: Modules | None = None) -> int:
    """Return the bytes of all slots on a GPU, each as large as the largest named adapter: later
    ones may take any slot.

    Args:
        config: options.
        most: bytes of the largest adapter to be loaded later, see `most_bytes`.
        modules: of the model. Experts in one piece take the memory of the largest rank. None: count
            the files.

    Raises:
        ConfigError, CheckpointError, ModelNotFoundError: as far as the files tell.
    """
    dtype, experts, sizes = factors_dtype(config), changed_experts(config), list[int]()
    for lora in named_adapters(config):
        file = read_adapter(lora.path, dtype)
        placed = None if modules is None else place(file, modules, experts).changes
        sizes.append(file.nbytes if placed is None else placed.factor_bytes)
    if config.reserve_loras:
        sizes.append(most)
    return config.max_loras * max(sizes, default=0)
