"""`vlm-serve plan`: what fits into the cache memory, from a config alone (design, section 7)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vlm_serve.config import DEFAULT_BLOCK_SIZE, EngineConfig
from vlm_serve.engine.memory import (
    DTYPES,
    EMBEDDING_CACHE_BYTES,
    CacheShape,
    MemoryPlan,
    default_cache_memory,
    plan_memory,
    split_by_interval,
)
from vlm_serve.errors import CheckpointError, ConfigError
from vlm_serve.models.config import ModelConfig

TABLE_INTERVALS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MIB = float(1 << 20)


def run(model: str, tensor_parallel: int, config: EngineConfig, *, as_json: bool) -> None:
    """Prints the plan.

    Raises:
        CheckpointError: no readable config there. ConfigError: it cannot fit; names the option.
    """
    if tensor_parallel < 1:
        raise ConfigError(f"tp must be at least 1, got {tensor_parallel}", param="tp")
    if config.block_size is None:
        config = replace(config, block_size=DEFAULT_BLOCK_SIZE)
    model_config = _read_config(Path(model))
    shape = CacheShape.of(model_config, tensor_parallel)
    dtype = DTYPES.get(config.dtype, model_config.dtype)
    kv_dtype = DTYPES.get(config.kv_cache_dtype, dtype)
    memory = plan_memory(
        shape,
        config,
        cache_memory=config.cache_memory_bytes or default_cache_memory(torch.device("cpu")),
        kv_dtype=kv_dtype,
        state_dtype=DTYPES.get(config.state_dtype, torch.float32),
        conv_dtype=dtype,
    )
    rows = [_table_row(memory, interval) for interval in TABLE_INTERVALS]
    if as_json:
        print(json.dumps(_as_json(memory, rows)))
    else:
        print(render(memory, model_config, rows))


def _read_config(path: Path) -> ModelConfig:
    if path.is_dir():
        return ModelConfig.from_dir(path)
    try:
        return ModelConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path.name} is no readable config") from error


def _table_row(memory: MemoryPlan, interval: int) -> dict[str, int]:
    blocks, snapshots = split_by_interval(
        memory.cache_memory, memory.block_bytes, memory.snapshot_bytes, interval
    )
    return {
        "interval": interval,
        "tokens": blocks * memory.block_size,
        "snapshots": snapshots,
    }


def _as_json(memory: MemoryPlan, rows: list[dict[str, int]]) -> dict[str, Any]:
    return {
        "block_bytes": memory.block_bytes,
        "snapshot_bytes": memory.snapshot_bytes,
        "live_state_bytes": memory.live_state_bytes,
        "tokens": memory.tokens,
        "snapshots": memory.num_snapshot_rows,
        "granularity": memory.block_size,
        "table": rows,
    }


def render(memory: MemoryPlan, model: ModelConfig, rows: list[dict[str, int]]) -> str:
    """The plan as text. All figures are per rank."""
    kv = memory.num_blocks * memory.block_bytes
    snapshots = memory.num_snapshot_rows * memory.snapshot_bytes
    lines = [
        "bucket              count        bytes each          MiB",
        _bucket("KV blocks", memory.num_blocks, memory.block_bytes, kv),
        _bucket("snapshots", memory.num_snapshot_rows, memory.snapshot_bytes, snapshots),
        _bucket("live state rows", memory.num_live_rows, memory.snapshot_bytes, None),
    ]
    if model.vision is not None:
        lines.append(f"{'vision embeddings':<18}{'up to':>7}{'':>18}{_mib(EMBEDDING_CACHE_BYTES)}")
    if model.text.moe is not None:
        per_block = memory.block_size * model.text.moe_layers * model.text.moe.top_k
        per_block *= 1 if model.text.moe.num_experts <= 256 else 2
        lines.append(_bucket("expert rows", memory.num_blocks, per_block, None))
    lines += [
        "",
        f"cache memory         {memory.cache_memory / _MIB:.0f} MiB pays for blocks and snapshots; "
        "the rest comes on top",
        f"tokens               {memory.tokens}",
        f"granularity          {memory.block_size} tokens, and exact media and turn boundaries",
        "",
        "interval (blocks)     tokens  snapshots",
        *(f"{row['interval']:>17}{row['tokens']:>11}{row['snapshots']:>11}" for row in rows),
    ]
    return "\n".join(lines)


def _bucket(name: str, count: int, each: int, total: int | None) -> str:
    return f"{name:<18}{count:>7}{each:>18}{_mib(count * each if total is None else total)}"


def _mib(size: int) -> str:
    return f"{size / _MIB:>13.1f}"
