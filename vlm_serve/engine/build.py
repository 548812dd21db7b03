"""Assembles an engine from a checkpoint and a config; decides the defaults that need both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import vlm_serve
from vlm_serve.cache.config import CacheConfig
from vlm_serve.cache.embeddings import EmbeddingCache
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.config import DEFAULT_BLOCK_SIZE, DEMO_BLOCK_SIZE, EngineConfig
from vlm_serve.engine.listener import PoisonListener
from vlm_serve.engine.media import MediaPlanner
from vlm_serve.engine.memory import (
    DTYPES,
    EMBEDDING_CACHE_BYTES,
    CacheShape,
    MemoryPlan,
    default_cache_memory,
    plan_memory,
)
from vlm_serve.engine.planning import SchedulerConfig
from vlm_serve.engine.runner import ModelRunner
from vlm_serve.engine.scheduler import Scheduler
from vlm_serve.engine.step_paths import compile_wanted, decode_graphs, graphs_wanted, use_compiled
from vlm_serve.engine.tier_loading import Tiers, make_tiers
from vlm_serve.engine.tier_up import TierFetcher
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.host_memory import retain_freed_memory
from vlm_serve.models import Model, ModelConfig, load_model, resolve_checkpoint
from vlm_serve.models.batch import CacheTensors
from vlm_serve.preprocess.keys import RootFields
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.prepare import Preprocessor, processor_fingerprint
from vlm_serve.preprocess.tokenizer import read_json

DEMO_DIRECTORIES = {"demo": "dense", "demo-moe": "moe"}
REPORTED_LOGITS_BYTES = 256 << 20
"""Logits of prompt tokens that one step may compute for requests that want to see them."""
NUMERICS_VERSION = 2
"""Raised whenever a kernel's arithmetic changes: what older code computed is then not reused."""


@dataclass(frozen=True)
class EngineParts:
    """Everything an Engine drives. `config` has its defaults filled in."""

    name: str
    config: EngineConfig
    model_config: ModelConfig
    memory: MemoryPlan
    preprocessor: Preprocessor
    scheduler: Scheduler
    runner: ModelRunner
    cache: PrefixCache
    generation_config: dict[str, Any]
    stop_tokens: frozenset[int]
    max_model_len: int
    tiers: Tiers | None = None
    fetcher: TierFetcher | None = None


def build(model: str, config: EngineConfig, *, poison: bool = False) -> EngineParts:
    """Loads the checkpoint and allocates the pools.

    Args:
        model: directory, hub id, "demo" or "demo-moe".
        config: options; None and "auto" values are decided here.
        poison: fill freed blocks and rows with NaN (tests).
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    path = _checkpoint(model)
    model_config = ModelConfig.from_dir(path)
    device = _device(config.device)
    with_graphs = graphs_wanted(config.cuda_graphs, device)
    with_compiled = not with_graphs and compile_wanted(config.compiled_kernels, device)
    dtype = _dtype(config, model_config, device)
    block_size = config.block_size
    if block_size is None:
        block_size = DEMO_BLOCK_SIZE if model in DEMO_DIRECTORIES else DEFAULT_BLOCK_SIZE
    config = replace(config, block_size=block_size)
    if device.type == "cpu":
        retain_freed_memory()
    loaded = load_model(path, dtype=dtype, device=device)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else DTYPES[config.kv_cache_dtype]
    state_dtype = torch.float32 if config.state_dtype == "auto" else DTYPES[config.state_dtype]
    memory = plan_memory(
        CacheShape.of(model_config),
        config,
        cache_memory=config.cache_memory_bytes or default_cache_memory(device),
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        conv_dtype=dtype,
    )
    preprocessor = _preprocessor(path, config, loaded, dtype, kv_dtype, state_dtype)
    tokens_that_fit = (memory.num_blocks - 1) * block_size
    context = config.max_model_len or model_config.text.max_position_embeddings
    max_model_len = min(context, tokens_that_fit)
    rows = memory.num_live_rows + memory.num_snapshot_rows + with_graphs
    caches = _allocate(model_config, memory, rows, device, dtype, kv_dtype, state_dtype)
    graphs = decode_graphs(loaded, caches, config, max_model_len) if with_graphs else None
    with_compiled = with_compiled and use_compiled(loaded, caches, config)
    runner = ModelRunner(
        loaded, caches, block_size=block_size, deterministic=config.deterministic, graphs=graphs
    )
    listener = PoisonListener(runner) if poison else None
    cache_config = _cache_config(config, memory)
    tiers = make_tiers(config, cache_config, caches, preprocessor.root_key(), listener)
    cache = PrefixCache(cache_config, tiers.listener if tiers else listener)
    fetcher = tiers.fetcher(cache) if tiers else None
    media = MediaPlanner(
        EmbeddingCache(EMBEDDING_CACHE_BYTES),
        model_config.text.hidden_size * torch.empty(0, dtype=dtype).element_size(),
    )
    return EngineParts(
        name=model,
        config=replace(
            config,
            device=str(device),
            dtype=_name_of(dtype),
            kv_cache_dtype=_name_of(kv_dtype),
            state_dtype=_name_of(state_dtype),
            threads=torch.get_num_threads(),
            cuda_graphs=graphs is not None,
            compiled_kernels=with_compiled,
        ),
        model_config=model_config,
        memory=memory,
        preprocessor=preprocessor,
        scheduler=Scheduler(
            cache, media, _scheduler_config(config, block_size, model_config), fetcher
        ),
        runner=runner,
        cache=cache,
        generation_config=read_json(path / "generation_config.json"),
        stop_tokens=preprocessor.tokenizer.eos_ids,
        max_model_len=max_model_len,
        tiers=tiers,
        fetcher=fetcher,
    )


def _checkpoint(model: str) -> Path:
    """The directory of a built-in or a named checkpoint."""
    if model in DEMO_DIRECTORIES:
        return Path(vlm_serve.__file__).parent / "demo" / DEMO_DIRECTORIES[model]
    return resolve_checkpoint(model)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but this machine has no usable GPU", param="device")
    return torch.device(name)


def _name_of(dtype: torch.dtype) -> str:
    return next(name for name, each in DTYPES.items() if each == dtype)


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.float32 if device.type == "cpu" else model.dtype


def _preprocessor(
    path: Path,
    config: EngineConfig,
    model: Model,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> Preprocessor:
    assert config.block_size is not None
    root = RootFields(
        weights_fingerprint=model.fingerprint,
        weight_dtype=str(dtype),
        kv_dtype=str(kv_dtype),
        state_dtype=str(state_dtype),
        vision_dtype=str(dtype),
        block_size=config.block_size,
        chunk_size=config.gdn_chunk_size,
        processor_fingerprint=processor_fingerprint(path),
        numerics_version=2 * NUMERICS_VERSION + config.deterministic,
    )
    return Preprocessor(
        path, block_size=config.block_size, root_key=root, limits=_media_limits(config)
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


def _allocate(
    model: ModelConfig,
    memory: MemoryPlan,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> CacheTensors:
    """The pools. Untouched pages of a CPU pool cost no memory until they are written."""
    shape = CacheShape.of(model)
    blocks, layers, size = memory.num_blocks, shape.attention_layers, memory.block_size
    quantised = kv_dtype == torch.uint8
    return CacheTensors(
        kv=torch.empty(
            (blocks, layers, 2, size, shape.kv_heads, shape.head_dim), dtype=kv_dtype, device=device
        ),
        kv_scales=torch.empty(
            (blocks, layers, 4, size, shape.kv_heads), dtype=torch.float16, device=device
        )
        if quantised
        else None,
        conv=torch.empty(
            (rows, shape.gdn_layers, shape.conv_dim, shape.conv_columns), dtype=dtype, device=device
        ),
        recurrent=torch.empty(
            (rows, shape.gdn_layers, shape.value_heads, shape.key_dim, shape.value_dim),
            dtype=state_dtype,
            device=device,
        ),
    )


def _cache_config(config: EngineConfig, memory: MemoryPlan) -> CacheConfig:
    return CacheConfig(
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        num_live_rows=memory.num_live_rows,
        num_snapshot_rows=memory.num_snapshot_rows,
        enabled=config.enable_prefix_caching,
        block_bytes=memory.block_bytes,
        snapshot_bytes=memory.snapshot_bytes,
    )


def _scheduler_config(config: EngineConfig, block_size: int, model: ModelConfig) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=block_size,
        chunk_size=config.gdn_chunk_size,
        state_interval=config.state_interval_blocks * block_size,
        decode_state_interval=config.prefix_cache_decode_state_interval,
        reported_tokens=max(block_size, REPORTED_LOGITS_BYTES // (4 * model.text.vocab_size)),
        complete_experts=config.expert_replay == "complete",
    )
