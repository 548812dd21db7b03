"""The totals of a server in one message: memory, usage, queue, tokens, latencies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vlm_serve.engine.memory import EMBEDDING_CACHE_BYTES, LOGPROB_CACHE_BYTES
from vlm_serve.server.state import ServerState

if TYPE_CHECKING:
    from vlm_serve.engine.memory import MemoryPlan


def cache_status(
    plan: MemoryPlan, state: ServerState, open_requests: int, stats: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the data of an event `status`.

    Args:
        plan: the engine's memory plan.
        state: the server's state.
        open_requests: number of open requests.
        stats: fresh result of `Engine.stats`.
    """
    cache = stats["cache"]
    return {
        "time": time.time(),
        "memory": memory_used(plan, stats),
        "memory_limits": memory_limits(plan),
        "usage": stats["usage"],
        "tiers": stats["tiers"],
        "running": stats["num_running"],
        "waiting": stats["num_waiting"],
        "joined": stats["num_joined"],
        "open_requests": open_requests,
        "requests": cache["requests"],
        "prompt_tokens": cache["query_tokens"],
        "hit_tokens": cache["hit_tokens"],
        "joined_requests": cache["joined_requests"],
        "joined_tokens": cache["joined_tokens"],
        "generated_tokens": state.num_generated_tokens,
        "reasons": cache["reasons"],
        "evictions": cache["evictions"],
        "steps": stats["num_steps"],
        "preemptions": stats["num_preemptions"],
        "time_to_first_token_seconds": state.first_token_seconds.percentiles(),
        "inter_token_seconds": state.inter_token_seconds.percentiles(),
    }


def memory_used(plan: MemoryPlan, stats: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes in use by bucket."""
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
    """Return the most bytes of each bucket; None: it depends on the other buckets."""
    return {
        "kv": plan.num_blocks * plan.block_bytes,
        "snapshots": plan.num_snapshot_rows * plan.snapshot_bytes,
        "live_states": plan.live_state_bytes,
        "embeddings": EMBEDDING_CACHE_BYTES,
        "experts": None,
        "logprobs": LOGPROB_CACHE_BYTES,
    }
