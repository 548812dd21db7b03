"""The totals of a server in one message: memory, use, queue, tokens, latencies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vlm_serve.engine.memory import EMBEDDING_CACHE_BYTES, LOGPROB_CACHE_BYTES

if TYPE_CHECKING:
    from vlm_serve.engine.memory import MemoryPlan
    from vlm_serve.server.service import Service


def status_of(service: Service, stats: Mapping[str, Any]) -> dict[str, Any]:
    """The data of an event `status`.

    Args:
        stats: what `Engine.stats` has returned just now.
    """
    cache = stats["cache"]
    return {
        "time": time.time(),
        "memory": memory_used(service.engine.memory, stats),
        "memory_limits": memory_limits(service.engine.memory),
        "usage": stats["usage"],
        "tiers": stats["tiers"],
        "running": stats["num_running"],
        "waiting": stats["num_waiting"],
        "open_requests": service.num_open,
        "requests": cache["requests"],
        "prompt_tokens": cache["query_tokens"],
        "hit_tokens": cache["hit_tokens"],
        "generated_tokens": service.num_generated_tokens,
        "reasons": cache["reasons"],
        "evictions": cache["evictions"],
        "steps": stats["num_steps"],
        "preemptions": stats["num_preemptions"],
        "time_to_first_token_seconds": service.recent_first_tokens.percentiles(),
        "inter_token_seconds": service.recent_tokens.percentiles(),
    }


def memory_used(plan: MemoryPlan, stats: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that hold anything, by bucket."""
    usage = stats["usage"]
    rows = usage["rows"]
    return {
        "kv": (usage["blocks"] - usage["free_blocks"]) * plan.block_bytes,
        "snapshots": (rows["ready"] + rows["reserved"] + rows["private"]) * plan.snapshot_bytes,
        "live_states": rows["live"] * plan.snapshot_bytes,
        "embeddings": stats["embedding_bytes"],
        "experts": usage["expert_bytes"],
        "logprobs": usage["logprob_bytes"],
    }


def memory_limits(plan: MemoryPlan) -> dict[str, int | None]:
    """Most bytes of each bucket; None: what the others hold decides."""
    return {
        "kv": plan.num_blocks * plan.block_bytes,
        "snapshots": plan.num_snapshot_rows * plan.snapshot_bytes,
        "live_states": plan.live_state_bytes,
        "embeddings": EMBEDDING_CACHE_BYTES,
        "experts": None,
        "logprobs": LOGPROB_CACHE_BYTES,
    }
