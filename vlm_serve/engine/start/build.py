"""Assembles an engine from a checkpoint and a config; decides the defaults that depend on both.

Among these are the context, the changes of config.json and the defaults of sampling: the
checkpoint's, neutral ones, or those of another folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.core.media_tiers import EmbeddingForm, EmbeddingTiers, UploadTiers
from vlm_serve.engine.core.planning import SchedulerConfig
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.features.adapters.options import serves_adapters
from vlm_serve.engine.features.drafts.lengths import CostCurve
from vlm_serve.engine.features.endings.endings import EndingMode
from vlm_serve.engine.features.table import Features, Options
from vlm_serve.engine.features.tiers.loading import make_tiers
from vlm_serve.engine.features.tiers.shared_store import SharedAddress, find_store
from vlm_serve.engine.features.weights import identity_of
from vlm_serve.engine.numerics.arithmetic import Arithmetic, decide, with_plain_ops
from vlm_serve.engine.numerics.dependence import parts_of
from vlm_serve.engine.numerics.invariance import exact_only
from vlm_serve.engine.requests.pooling import head_rows, pooled_tokens, with_task
from vlm_serve.engine.requests.request import Language
from vlm_serve.engine.start.adapter_start import make_adapters
from vlm_serve.engine.start.draft_start import make_drafters, measure_costs, with_drafts, with_mtp
from vlm_serve.engine.start.kernel_check import check_at_start
from vlm_serve.engine.start.machine_sizes import MachineSizes, with_machine, with_step_target
from vlm_serve.engine.start.parts import EngineParts
from vlm_serve.engine.start.step_memory import reported_tokens, try_steps
from vlm_serve.engine.start.weight_start import make_reader, update_bytes
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.engine.steps.memory import (
    EMBEDDING_CACHE_BYTES,
    LOGPROB_CACHE_BYTES,
    MemoryPlan,
    check_host_cache,
    check_pools,
    default_cache_memory,
    embedding_bytes,
    live_bytes,
    named_shortage,
    plan_memory,
)
from vlm_serve.engine.steps.ranks.executor import ShardedExecutor
from vlm_serve.engine.steps.ranks.process import RankProcesses
from vlm_serve.engine.steps.ranks.start import load
from vlm_serve.engine.steps.ranks.task import ModelSource, Pools
from vlm_serve.engine.steps.step_paths import (
    Captured,
    capture,
    compile_steps,
    find_backend,
    graphs_wanted,
)
from vlm_serve.errors import CheckpointError, ConfigError
from vlm_serve.kernels.backends import choose
from vlm_serve.kernels.triton_support import keep_private
from vlm_serve.models import Model, ModelSpec, read_spec, resolve_checkpoint
from vlm_serve.models.cache_layout import CacheLayout, CacheTensors
from vlm_serve.models.config import Changes, read_json
from vlm_serve.models.files import check_no_revision, check_no_tower
from vlm_serve.models.weight_sizes import WeightBytes, check_stored, weight_bytes
from vlm_serve.options.config import DEFAULT_BLOCK_SIZE, DEMO_BLOCK_SIZE, EngineConfig
from vlm_serve.preprocess.identity.keys import RootFields
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.media_processors import processor_fingerprint
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.text.sentence_files import Sentences
from vlm_serve.system.host_memory import retain_freed_memory

DEMO_DIRECTORIES = {"demo": "dense", "demo-moe": "moe"}
_DEMO_FOLDER = Path(__file__).parents[2] / "demo"
MIN_STEP_TOKENS, GPU_MIN_STEP_TOKENS = 256, 1024
"""Prompt tokens that a step may always have. On a GPU the host takes tens of milliseconds to launch
a step of any size."""
GENERATION = "generation_config.json"
CARDS_FACTOR = 4
"""The largest YaRN factor that the model cards of Qwen3, Qwen3-VL, Qwen3-Next and Qwen3.5 name."""


def build(
    model: str,
    config: EngineConfig,
    *,
    poison: bool = False,
    processes: RankProcesses | None = None,
) -> EngineParts:
    """Load the checkpoint and allocate the pools.

    Args:
        model: directory, GGUF file, hub id, "demo" or "demo-moe".
        config: options; None and "auto" values are decided here.
        poison: fill freed blocks and rows with NaN (tests).
        processes: existing processes of other ranks, which outlive the engine (tests).
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    address = find_store(config)
    path = find_checkpoint(model, revision=config.revision, tower=config.mmproj)
    can_sleep(config, device_of(config.device))
    changes, size = changes_of(config), config.tensor_parallel_size
    spec = with_generation(read_spec(path, changes), config)
    config = with_task(config, spec)
    check_stored(spec, path)
    mtp = with_mtp(config, spec)
    layout = spec.cache_layout(size, mtp=mtp)
    device = device_of(config.device)
    if device.type != "cpu":
        keep_private()
    with_graphs = graphs_wanted(config.cuda_graphs, device, size)
    backend = find_backend(config, device)
    config = with_drafts(config, device, compiled=backend.compiled)
    arithmetic = decide(config, spec.dtype, backend, spec.quantization, parts_of(spec, config))
    config = with_block_size(config, model)
    assert config.block_size is not None
    machine = None
    if device.type == "cpu":
        retain_freed_memory()
    else:
        choose(config.gpu_kernels)
    if device.type == "cuda" and size == 1:
        weights = weights_in_memory(
            spec, config, arithmetic, device, compiled=backend.compiled, mtp=mtp
        )
        memory = torch.cuda.mem_get_info(device)[0] - weights.in_memory
        types = arithmetic.types
        config, machine = with_machine(config, layout, types, spec.vocab_size, memory)
    pooled = pooled_tokens(config, spec, path)
    fixed = not config.allow_weight_updates
    source = ModelSource(
        path, spec, arithmetic, device, backend.compiled, mtp, changes, pooled, keeps_files=fixed
    )
    loaded, started = load(source, config, processes)
    try:
        executor = _Loaded(source, layout, loaded, started, owned=processes is None)
        return _assemble(
            executor, config, address, with_graphs=with_graphs, poison=poison, machine=machine
        )
    except BaseException:
        if started is not None and processes is None:
            started.close()
        raise


@dataclass(frozen=True)
class _Loaded:
    """A loaded model and the processes of other ranks. If `owned`, the processes end with the
    engine."""

    source: ModelSource
    layout: CacheLayout
    model: Model
    processes: RankProcesses | None
    owned: bool


def _assemble(
    loaded: _Loaded,
    config: EngineConfig,
    address: SharedAddress | None,
    *,
    with_graphs: bool,
    poison: bool,
    machine: MachineSizes | None,
) -> EngineParts:
    """Assemble all other components. Raise ConfigError if memory does not suffice."""
    arithmetic = check_at_start(loaded.model, loaded.source.arithmetic, config)
    loaded = replace(loaded, source=replace(loaded.source, arithmetic=arithmetic))
    source, model = loaded.source, loaded.model
    spec, types, size = source.spec, source.arithmetic.types, config.tensor_parallel_size
    steps = try_steps(source, model, config, with_graphs=with_graphs)
    live = live_bytes(loaded.layout, config, types)
    weights = weights_in_memory(
        spec,
        config,
        source.arithmetic,
        source.device,
        compiled=source.compiled,
        mtp=source.drafts,
        quantised=model.quantised,
    )
    updates = update_bytes(config, weights)
    cache_memory = config.cache_memory_bytes or default_cache_memory(
        source.device, size, steps, live=live, updates=updates
    )
    memory = plan_memory(loaded.layout, config, types, cache_memory)
    check_pools(memory, size, source.device)
    max_model_len = longest_context(config, spec, memory)
    rows = memory.num_live_rows + memory.num_snapshot_rows + with_graphs
    pools = Pools.of(types, memory, rows, deterministic=config.deterministic)
    with named_shortage(memory):
        caches = pools.allocate(model)
    graphs = capture(model, caches, config, max_model_len) if with_graphs else Captured()
    if source.compiled and not compile_steps(model, caches):
        source = replace(source, arithmetic=with_plain_ops(arithmetic))
        loaded = replace(loaded, source=source)
    make_preprocessor = _preprocessor(loaded, config, max_model_len)
    preprocessor = make_preprocessor()
    executor = _executor(loaded, caches, pools, graphs, config)
    room = steps.adapters if steps is not None and serves_adapters(config) else None
    adapters, slots = make_adapters(source, model, config, executor, room)
    on_gpu = source.device.type == "cuda"
    times = executor.measure_plain(most_sequences=config.max_num_seqs) if on_gpu else []
    config = with_step_target(config, times)
    drafters = make_drafters(config)
    costs, pass_costs = measure_costs(executor, config) if drafters else (None, None)
    cache = PrefixCache(_cache_config(config, memory, loaded))
    if poison:
        cache.events.block_freed.subscribe(lambda block: executor.poison_freed((block,), ()))
        cache.events.row_freed.subscribe(lambda row: executor.poison_freed((), (row,)))
    form = None
    if spec.vision is not None:
        form = EmbeddingForm(spec.embedding_width, types.vision)
    assert isinstance(config.host_cache_memory, int)
    check_host_cache(config.host_cache_memory)
    tiers = make_tiers(
        config,
        cache,
        executor.pages,
        preprocessor.owner_key(),
        form=form,
        address=address,
        promised=source.compiled,
    )
    fetcher = tiers.fetcher if tiers is not None else None
    embeddings = None
    if tiers is not None and form is not None:
        embeddings = EmbeddingTiers(tiers.stack, form, executor.embedding, executor.read_rows)
        preprocessor.keep_records(UploadTiers(tiers.stack))
    token_bytes = embedding_bytes(spec, types)
    media = MediaPlanner(
        EmbeddingCache(EMBEDDING_CACHE_BYTES),
        token_bytes,
        embeddings,
        coded=executor.takes_codes,
    )
    preprocessor.know_embeddings(media.cache.__contains__)
    tokenizer = preprocessor.tokenizer
    limits = _scheduler_config(config, spec, source)
    scheduler = Scheduler(cache, media, limits)
    options = Options(
        limits,
        fetcher=fetcher,
        drafters=drafters,
        costs=costs or CostCurve(),
        pass_costs=pass_costs,
        never_drafted=preprocessor.media_token_ids,
        slots=slots,
        weights=make_reader(source, model, loaded.processes, config, updates),
        adapters=adapters,
    )
    return EngineParts(
        config=_decided(config, source, graphs=bool(graphs.steps)),
        spec=spec,
        arithmetic=source.arithmetic,
        weights=weights,
        memory=memory,
        steps=steps,
        preprocessor=preprocessor,
        make_preprocessor=make_preprocessor,
        language=Language(tokenizer, tokenizer.eos_ids, spec.vocab_size, max_model_len),
        scheduler=scheduler,
        features=Features(scheduler, options),
        adapters=adapters,
        executor=executor,
        release=executor.release_pools if can_sleep(config, source.device) else None,
        cache=cache,
        media=media,
        tiers=tiers,
        degraded=graphs.problem,
        machine=machine and replace(machine, times=tuple(times)),
    )


def _executor(
    loaded: _Loaded,
    caches: CacheTensors,
    pools: Pools,
    graphs: Captured,
    config: EngineConfig,
) -> LocalExecutor:
    model, processes = loaded.model, loaded.processes
    if processes is not None:
        limit, owned = config.stall_timeout, loaded.owned
        return ShardedExecutor(model, caches, pools, processes, limit=limit, owned=owned)
    return LocalExecutor(
        model,
        caches,
        block_size=pools.block_size,
        deterministic=config.deterministic,
        graphs=graphs.steps,
        draft_graphs=graphs.drafts,
        tower_graphs=graphs.tower,
        ahead=bool(graphs.steps),
        max_num_seqs=config.max_num_seqs,
    )


def _decided(config: EngineConfig, source: ModelSource, *, graphs: bool) -> EngineConfig:
    """Return the config with the decided values in place of None and "auto"."""
    names = source.arithmetic.types.names()
    return replace(
        config,
        device=str(source.device),
        dtype=names["weights"],
        compute_dtype=names["compute"],
        kv_cache_dtype=names["kv"],
        state_dtype=names["state"],
        threads=torch.get_num_threads(),
        cuda_graphs=graphs,
        compiled_kernels=source.compiled,
        quantized_activations="int8" if source.arithmetic.dynamic else "none",
    )


@contextmanager
def naming_folder(model: str) -> Iterator[None]:
    """Begin CheckpointErrors of the block with the folder of a local model: a relative path or a
    link is the usual reason."""
    try:
        yield
    except CheckpointError as error:
        if not Path(model).exists():
            raise
        raise CheckpointError(f"{Path(model).resolve()}: {error.message}") from error


def with_block_size(config: EngineConfig, model: str) -> EngineConfig:
    """Return the config with the model's default block size, if it has none."""
    if config.block_size is not None:
        return config
    return replace(
        config, block_size=DEMO_BLOCK_SIZE if model in DEMO_DIRECTORIES else DEFAULT_BLOCK_SIZE
    )


def find_checkpoint(
    model: str,
    *,
    configs_only: bool = False,
    revision: str | None = None,
    tower: str | None = None,
) -> Path:
    """Return the directory of a built-in or a named checkpoint; see `resolve_checkpoint`."""
    if model in DEMO_DIRECTORIES:
        check_no_revision(revision)
        check_no_tower(tower)
        return _DEMO_FOLDER / DEMO_DIRECTORIES[model]
    return resolve_checkpoint(model, configs_only=configs_only, revision=revision, tower=tower)


def weights_in_memory(
    spec: ModelSpec,
    config: EngineConfig,
    arithmetic: Arithmetic,
    device: torch.device,
    *,
    compiled: bool,
    mtp: bool,
    quantised: Collection[str] | None = None,
) -> WeightBytes:
    """Compute what the weights take on each rank, in bytes.

    Args:
        spec: the model.
        config: options, with a task.
        arithmetic: types of weights and computation.
        device: where they lie.
        compiled: the kernels are compiled code.
        mtp: the layers that draft are loaded too.
        quantised: see `weight_bytes`; None: not loaded yet.
    """
    return weight_bytes(
        spec,
        weights=arithmetic.types.weights,
        compute=arithmetic.types.compute,
        device=device,
        compiled=compiled,
        tensor_parallel=config.tensor_parallel_size,
        drafts=mtp,
        quantised=quantised,
        bits=arithmetic.bits,
        head_rows=head_rows(config, spec),
        keeps_files=not config.allow_weight_updates,
    )


def can_sleep(config: EngineConfig, device: torch.device) -> bool:
    """Return True if an engine can give memory back and take it again.

    Raises ConfigError if it cannot and is to do so by itself.
    """
    possible = device.type == "cpu" and config.tensor_parallel_size == 1
    if config.idle_sleep is not None and not possible:
        raise ConfigError(
            "idle_sleep is not possible with a GPU or several ranks", param="idle_sleep"
        )
    return possible


def device_of(name: str) -> torch.device:
    """Return the device that the option `device` names. Raise ConfigError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but this machine has no usable GPU", param="device")
    return torch.device(name)


def _preprocessor(
    loaded: _Loaded, config: EngineConfig, max_tokens: int
) -> Callable[[], Preprocessor]:
    """Return what makes the preprocessor, here or in another process."""
    source, model = loaded.source, loaded.model
    assert config.block_size is not None
    judges = config.task in ("rerank", "classify") and model.spec.vision is None
    thoughtless = {"enable_thinking": False} if judges else {}
    names = source.arithmetic.types.names()
    root = RootFields(
        weight_dtype=names["weights"],
        compute_dtype=names["compute"],
        memory=loaded.layout.types(source.arithmetic.types.pools),
        vision_dtype=names["vision"],
        block_size=config.block_size,
        chunk_size=config.chunk_size,
        processor_fingerprint=processor_fingerprint(source.path, model.spec.config),
        numerics=source.arithmetic.numerics,
    )
    return partial(
        Preprocessor,
        source.path,
        block_size=config.block_size,
        root_key=root,
        weights=identity_of(model),
        family=model.spec.family,
        config=model.spec.config,
        limits=_media_limits(config),
        max_tokens=max_tokens,
        generation=generation_folder(config),
        template_file=config.chat_template,
        template_kwargs={**thoughtless, **(config.chat_template_kwargs or {})},
        sentences=Sentences.of(source.path) if config.task == "embed" else None,
        # Chunks of a state's prefill end at cut points. Only compiled kernels have the same bits
        # wherever chunks end.
        marks_cut=source.compiled or not loaded.layout.has_state,
    )


def _media_limits(config: EngineConfig) -> MediaLimits:
    allowed = config.allowed_local_media_path
    most = config.max_media_per_prompt or {}
    return MediaLimits(
        max_images=most.get("image"),
        max_videos=most.get("video"),
        max_image_pixels=config.max_image_pixels,
        max_fetch_seconds=config.media_fetch_timeout,
        allowed_local_media_path=Path(allowed) if allowed is not None else None,
        allowed_media_domains=config.allowed_media_domains,
        allow_private_networks=config.allow_private_networks,
    )


def _cache_config(config: EngineConfig, memory: MemoryPlan, loaded: _Loaded) -> CacheConfig:
    return CacheConfig(
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        num_live_rows=memory.num_live_rows,
        num_snapshot_rows=memory.num_snapshot_rows,
        enabled=config.enable_prefix_caching,
        has_state=loaded.layout.has_state,
        learned_places=config.prefix_cache_places == "learned",
        block_bytes=memory.block_bytes,
        snapshot_bytes=memory.snapshot_bytes,
        logprob_bytes=LOGPROB_CACHE_BYTES,
        exact_only=exact_only(config, compiled=loaded.source.compiled),
    )


def _scheduler_config(
    config: EngineConfig, model: ModelSpec, source: ModelSource
) -> SchedulerConfig:
    block_size = config.block_size
    assert block_size is not None
    least = MIN_STEP_TOKENS if source.device.type == "cpu" else GPU_MIN_STEP_TOKENS
    ends = config.prefix_cache_answer_ends
    if exact_only(config, compiled=source.compiled):
        ends = "off"
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=block_size,
        chunk_size=config.chunk_size,
        state_interval=config.state_interval_blocks * block_size,
        decode_state_interval=config.prefix_cache_decode_state_interval,
        extends_steps=True,
        reported_tokens=reported_tokens(config, model),
        complete_experts=config.expert_replay == "complete",
        speculative_tokens=0 if config.speculative == "off" else config.speculative_tokens,
        step_seconds=(config.step_time_target or 0.0) / 1000,
        min_step_tokens=max(least, block_size),
        answer_ends=cast(EndingMode, ends),
    )


def with_generation(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Return the model with the configured defaults of sampling.

    Raises:
        ConfigError: there is no generation_config.json in the named folder.
        CheckpointError: the file cannot be read.
    """
    chosen = config.generation_config
    if chosen == "vllm":
        return replace(spec, generation={})
    folder = generation_folder(config)
    return spec if folder is None else replace(spec, generation=read_json(folder / GENERATION))


def generation_folder(config: EngineConfig) -> Path | None:
    """Return the folder of another generation_config.json; None: the checkpoint's own is used.

    Raises:
        ConfigError: there is no such file.
    """
    if config.generation_config in ("auto", "vllm"):
        return None
    folder = Path(config.generation_config)
    if not (folder / GENERATION).is_file():
        raise ConfigError(
            f"generation_config must be auto, vllm or a folder with {GENERATION}, got "
            f"{config.generation_config!r}",
            param="generation_config",
        )
    return folder


def longest_context(config: EngineConfig, model: ModelSpec, memory: MemoryPlan) -> int:
    """Return the maximum number of tokens of a prompt with its answer.

    Raises:
        ConfigError: `max_model_len` exceeds the model's context, and that is not allowed.
    """
    context, most = config.max_model_len, model.max_position_embeddings
    if context is not None and context > most and not config.allow_long_max_model_len:
        raise ConfigError(
            f"max_model_len is {context}, but this checkpoint is made for {most} tokens: lower it, "
            f"{_longer(model, context)}, or pass --allow-long-max-model-len",
            param="max_model_len",
        )
    context = context or most
    return min(context, (memory.num_blocks - 1) * memory.block_size)


def _longer(model: ModelSpec, context: int) -> str:
    """Return the advice by which YaRN extends a model to a context, or how far it goes."""
    yarn = model.rope.yarn
    original = model.max_position_embeddings if yarn is None else yarn.original
    factor = -(-context // original)
    fields = {"factor": float(factor), "original_max_position_embeddings": original}
    if factor > CARDS_FACTOR:
        reach = CARDS_FACTOR * original
        return f"to at most {reach} with YaRN (model cards go to a factor of {CARDS_FACTOR})"
    return f"extend it by --rope-scaling '{json.dumps({'rope_type': 'yarn'} | fields)}'"


def changes_of(config: EngineConfig) -> Changes:
    """Return the changes of config.json that the options ask for."""
    return Changes(config.hf_overrides or {}, config.rope_scaling or {})
