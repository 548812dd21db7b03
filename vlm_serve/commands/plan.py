"""`vlm-serve plan`: computes from a config alone how much fits in the cache memory.

docs/architecture.md#memory
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vlm_serve.engine.features.drafts.suffix import ANSWER_BYTES
from vlm_serve.engine.features.tiers.shared_store import read_address
from vlm_serve.engine.numerics.arithmetic import Arithmetic, decide
from vlm_serve.engine.numerics.dependence import parts_of
from vlm_serve.engine.requests.pooling import with_task
from vlm_serve.engine.start.adapter_start import planned_bytes
from vlm_serve.engine.start.build import (
    changes_of,
    find_checkpoint,
    longest_context,
    naming_folder,
    weights_in_memory,
    with_block_size,
)
from vlm_serve.engine.start.draft_start import with_drafts, with_mtp
from vlm_serve.engine.start.machine_sizes import MachineSizes, with_machine
from vlm_serve.engine.start.step_memory import planned_step_memory
from vlm_serve.engine.start.weight_start import update_bytes
from vlm_serve.engine.steps.memory import (
    EMBEDDING_CACHE_BYTES,
    LOGPROB_CACHE_BYTES,
    MemoryPlan,
    StepMemory,
    default_cache_memory,
    embedding_bytes,
    live_bytes,
    plan_memory,
    split_by_interval,
)
from vlm_serve.engine.steps.ranks.start import slot_bytes
from vlm_serve.engine.steps.step_paths import find_backend, graphs_wanted
from vlm_serve.errors import ConfigError
from vlm_serve.models import ModelSpec, read_spec
from vlm_serve.models.weight_sizes import WeightBytes, check_stored, prompt_price
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import format_size, parse_size

TABLE_INTERVALS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """The result of starting with these options. All sizes are per rank, in bytes.

    Attributes:
        rows: capacity in tokens and snapshots per TABLE_INTERVALS; empty for models without state.
        embedding_bytes: per vision token, with its features; 0 for text-only models.
        max_model_len: longest prompt plus answer, in tokens.
        steps: what steps take on a GPU beside weights and pools; None elsewhere, and with ranks.
        adapter_bytes: of the adapters that options name, in host memory and laid out.
        machine: what a GPU's memory decides; None: not known, or on a CPU.
    """

    model: ModelSpec
    config: EngineConfig
    arithmetic: Arithmetic
    weights: WeightBytes
    memory: MemoryPlan
    rows: tuple[dict[str, int], ...]
    max_model_len: int
    embedding_bytes: int
    adapter_bytes: int
    steps: StepMemory | None
    machine: MachineSizes | None


def run(
    model: str, config: EngineConfig, *, as_json: bool, device_memory: str | None = None
) -> None:
    """Print the plan.

    Args:
        model, config: as for serving.
        as_json: print JSON.
        device_memory: free memory of a GPU that is not here, such as "80GiB".

    Raises:
        CheckpointError: there is no readable config.
        ConfigError: it cannot fit; names the option.
    """
    with naming_folder(model):
        free = None if device_memory is None else parse_size(device_memory, "device_memory")
        plan = make(model, config, free)
    print(json.dumps(_as_json(plan)) if as_json else render(plan))


def make(model: str, config: EngineConfig, device_memory: int | None = None) -> ServingPlan:
    """Compute the plan without loading weights or compiling kernels. Raises as `run`."""
    config = with_block_size(config, model)
    ranks = config.tensor_parallel_size
    named = Path(model).suffix == ".json"
    path = (
        Path(model)
        if named
        else find_checkpoint(
            model, configs_only=True, revision=config.revision, tower=config.mmproj
        )
    )
    spec = read_spec(path, changes_of(config))
    config = with_task(config, spec)
    check_stored(spec, path)
    mtp = with_mtp(config, spec)
    layout = spec.cache_layout(ranks, mtp=mtp)
    device = _device(config.device)
    backend = find_backend(config, device, build=False)
    config = with_drafts(config, device, compiled=backend.compiled)
    arithmetic = decide(config, spec.dtype, backend, spec.quantization, parts_of(spec, config))
    types = arithmetic.types
    weights = weights_in_memory(
        spec, config, arithmetic, device, compiled=backend.compiled, mtp=mtp
    )
    on_gpu = device.type == "cuda"
    if device_memory is not None and not on_gpu:
        raise ConfigError(
            "device_memory is that of a GPU: add --device cuda", param="device_memory"
        )
    free, machine, steps = device_memory, None, None
    if on_gpu and free is None and torch.cuda.is_available():
        free = torch.cuda.mem_get_info(device)[0]
    beside = None if free is None else free - weights.in_memory
    if beside is not None and ranks == 1:
        config, machine = with_machine(config, layout, types, spec.vocab_size, beside)
    if on_gpu and ranks == 1:
        graphs = graphs_wanted(config.cuda_graphs, device)
        steps = planned_step_memory(spec, path, types, config, with_graphs=graphs)
    # The memory of an absent GPU is unknown, unless it is given: use this machine's instead.
    here = device if beside is not None else torch.device("cpu")
    live = live_bytes(layout, config, types)
    cache_memory = config.cache_memory_bytes or default_cache_memory(
        here, ranks, steps, live=live, free=beside, updates=update_bytes(config, weights)
    )
    memory = plan_memory(layout, config, types, cache_memory)
    return ServingPlan(
        model=spec,
        config=config,
        arithmetic=arithmetic,
        weights=weights,
        memory=memory,
        rows=tuple(
            _table_row(memory, interval) for interval in TABLE_INTERVALS if layout.has_state
        ),
        max_model_len=longest_context(config, spec, memory),
        embedding_bytes=embedding_bytes(spec, types),
        adapter_bytes=planned_bytes(config, compiled=backend.compiled),
        steps=steps,
        machine=machine,
    )


def _device(name: str) -> torch.device:
    """Return the device that it would run on; a named GPU may be another machine's."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _table_row(memory: MemoryPlan, interval: int) -> dict[str, int]:
    blocks, snapshots = split_by_interval(
        memory.cache_memory, memory.block_bytes, memory.snapshot_bytes, interval
    )
    return {
        "interval": interval,
        "tokens": blocks * memory.block_size,
        "snapshots": snapshots,
    }


def _as_json(plan: ServingPlan) -> dict[str, Any]:
    memory, weights, arithmetic = plan.memory, plan.weights, plan.arithmetic
    return {
        "weights": {
            "in_memory": weights.in_memory,
            "projections": weights.projections,
            "table": weights.table,
            "table_in_file": weights.mapped,
            "formats": dict(weights.formats),
        },
        "quantization": str(plan.model.quantization) if plan.model.quantization else None,
        "types": arithmetic.types.names(),
        "compute_reason": arithmetic.reason,
        "numerics": arithmetic.numerics,
        "max_model_len": plan.max_model_len,
        "block_bytes": memory.block_bytes,
        "snapshot_bytes": memory.snapshot_bytes,
        "live_state_bytes": memory.live_state_bytes,
        "draft_update_bytes": memory.num_updates * memory.update_bytes,
        "embedding_bytes": plan.embedding_bytes,
        "update_bytes": update_bytes(plan.config, plan.weights),
        "adapter_bytes": plan.adapter_bytes,
        "max_num_seqs": plan.config.max_num_seqs,
        "max_num_batched_tokens": plan.config.max_num_batched_tokens,
        "sizes": [asdict(size) for size in plan.machine.sizes] if plan.machine else None,
        "step_bytes": asdict(plan.steps) if plan.steps else None,
        "tokens": memory.tokens,
        "snapshots": memory.num_snapshot_rows,
        "granularity": memory.block_size,
        "table": plan.rows,
    }


def render(plan: ServingPlan) -> str:
    """Format the plan as text."""
    memory = plan.memory
    facts = [
        *_ranks(plan),
        ("weights", str(plan.weights)),
        *([("quantised", str(scheme))] if (scheme := plan.model.quantization) else []),
        *plan.arithmetic.rows(),
        (
            "cache memory",
            f"{memory.cache_memory / _MIB:.0f} MiB for blocks and snapshots; the rest is extra",
        ),
        *([("steps", f"{plan.steps}, extra")] if plan.steps else []),
        *_drafts(plan),
        *(plan.machine.rows(plan.config) if plan.machine else []),
        *_tiers(plan.config),
        ("tokens", str(memory.tokens)),
        ("context", f"{plan.max_model_len} tokens"),
        (
            "granularity",
            f"{memory.block_size} tokens (--block-size), and exact media and turn boundaries",
        ),
    ]
    lines = [
        "bucket              count        bytes each          MiB",
        *_buckets(plan),
        "",
        *(f"{name:<20} {text}" for name, text in facts),
    ]
    if plan.rows:
        lines += [
            "",
            "What fits if a snapshot is kept every so many blocks (--prefix-cache-state-interval):",
            "interval (blocks)     tokens  snapshots",
        ]
    lines += [
        f"{row['interval']:>17}{row['tokens']:>11}{row['snapshots']:>11}" for row in plan.rows
    ]
    return "\n".join(lines)


def _buckets(plan: ServingPlan) -> list[str]:
    memory, model = plan.memory, plan.model
    lines = [
        _bucket("KV blocks", memory.num_blocks, memory.block_bytes),
        _bucket("snapshots", memory.num_snapshot_rows, memory.snapshot_bytes),
        _bucket("live state rows", memory.num_live_rows, memory.snapshot_bytes),
    ]
    if memory.num_updates:
        purpose = "replay" if plan.config.speculative == "off" else "draft"
        lines.append(_bucket(f"{purpose} updates", memory.num_updates, memory.update_bytes))
    if "suffix" in plan.config.speculative:
        lines.append(_bound("draft texts", ANSWER_BYTES))
    if plan.embedding_bytes:
        tokens = EMBEDDING_CACHE_BYTES // plan.embedding_bytes
        lines.append(_bucket("vision embeddings", tokens, plan.embedding_bytes))
    if model.routing is not None:
        per_block = memory.block_size * model.expert_layers * model.routing.top_k
        per_block *= 1 if model.routing.num_experts <= 256 else 2
        lines.append(_bucket("expert rows", memory.num_blocks, per_block))
    if plan.adapter_bytes:
        count = len(plan.config.lora_modules)
        lines.append(_bucket("adapters", count, plan.adapter_bytes // count))
    if plan.config.allow_weight_updates:
        lines.append(_bound("other weights", update_bytes(plan.config, plan.weights)))
    lines.append(_bound("prompt logprobs", LOGPROB_CACHE_BYTES))
    return lines


def _ranks(plan: ServingPlan) -> list[tuple[str, str]]:
    """Describe the extra memory of several ranks, if there are several."""
    config = plan.config
    if config.tensor_parallel_size == 1:
        return []
    exchange = format_size(2 * slot_bytes(plan.model, config))
    text = f"{config.tensor_parallel_size}; all sizes are per rank, plus up to {exchange} each"
    return [("ranks", f"{text} for exchanges")]


def _drafts(plan: ServingPlan) -> list[tuple[str, str]]:
    """Describe the cost of the model's MTP layer, if it drafts."""
    if "mtp" not in plan.config.speculative:
        return []
    price = (
        f"prompts cost {prompt_price(plan.model):.1%} more; its KV and states are included above"
    )
    return [("mtp", price)]


def _tiers(config: EngineConfig) -> list[tuple[str, str]]:
    """Describe the tiers below the cache memory, if any."""
    host, disk = config.host_cache_memory, config.disk_cache_size
    assert isinstance(host, int) and isinstance(disk, int)
    tiers = [("host memory", f"{format_size(host)} below the cache memory")] if host else []
    if config.disk_cache_path is not None:
        tiers.append(("disk", f"{format_size(disk)} in {config.disk_cache_path}"))
    address = read_address(config)
    if address is not None:
        tiers.append(("shared store", _shared(config, address.text, keyed=bool(address.secret))))
    return tiers


def _shared(config: EngineConfig, where: str, *, keyed: bool) -> str:
    limit, bandwidth = config.shared_store_timeout, config.shared_store_write_bandwidth
    assert isinstance(bandwidth, int)
    return (
        f"{where}, {'with' if keyed else 'without'} a key; {config.shared_store_write} written, "
        f"{format_size(bandwidth)}/s at most; a request waits {limit:g} s at most"
    )


def _bucket(name: str, count: int, size: int) -> str:
    return f"{name:<18}{count:>7}{size:>18}{_mib(count * size)}"


def _bound(name: str, most: int) -> str:
    return f"{name:<18}{'up to':>7}{'':>18}{_mib(most)}"


def _mib(size: int) -> str:
    return f"{size / _MIB:>13.1f}"
