"""Memory sizes, for start-up and for planning from a config alone (docs/architecture.md#memory).

Sizes are bytes per rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from vlm_serve.engine.core.queues import UpdateSlots
from vlm_serve.engine.numerics.arithmetic import Types
from vlm_serve.errors import ConfigError
from vlm_serve.models import ModelSpec
from vlm_serve.models.cache_layout import CacheLayout
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import format_size
from vlm_serve.system.process_limits import free_address_space

EMBEDDING_CACHE_BYTES = 256 << 20
LOGPROB_CACHE_BYTES = 64 << 20
CPU_SHARE = 4
"""On a CPU the cache takes one part in this many of the memory that is free at start-up."""
CPU_CEILING = 4 << 30
GPU_SHARE, RANKS_SHARE = 0.95, 0.85
"""On a GPU the cache takes this part of what weights and steps leave free; what is left is for
fragments. With ranks, whose steps are not measured, they are in that part too."""
MIN_BLOCKS = 4
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of the cache memory. `live_rows`, embeddings, expert rows, stored prompt
    log-probabilities and update slots come on top."""

    cache_memory: int
    block_size: int
    block_bytes: int
    snapshot_bytes: int
    num_blocks: int
    num_snapshot_rows: int
    num_live_rows: int
    update_bytes: int = 0
    num_updates: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens whose KV fits."""
        return self.num_blocks * self.block_size

    @property
    def live_state_bytes(self) -> int:
        return self.num_live_rows * self.snapshot_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools: the cache memory, live rows and update slots."""
        updates = self.num_updates * self.update_bytes
        return self.cache_memory + self.live_state_bytes + updates


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Most bytes allocated at a time beside weights and pools.

    Attributes:
        forward: in a step of `max_num_batched_tokens` tokens, its logits included.
        vision: in the vision tower, for as many placeholder tokens as a step may encode.
        graphs: what captured steps keep.
        adapters: what the slots of adapters keep.
        sampling: beside the logits, of as many sequences as may run, with the counts of penalties.
        tiers: what waits for its copy to lower cache tiers.
    """

    forward: int
    vision: int
    graphs: int
    adapters: int = 0
    sampling: int = 0
    tiers: int = 0

    @property
    def total(self) -> int:
        """The tower and the language model run one after the other; the others keep theirs."""
        others = self.graphs + self.adapters + self.sampling + self.tiers
        return max(self.forward, self.vision) + others

    def __str__(self) -> str:
        parts = {"text": self.forward, "media": self.vision, "graphs": self.graphs}
        parts |= {"adapters": self.adapters, "sampling": self.sampling, "tiers": self.tiers}
        return ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)


def split_by_interval(
    cache_memory: int, block_bytes: int, snapshot_bytes: int, interval: int
) -> tuple[int, int]:
    """Return (blocks, snapshots) with one snapshot per `interval` blocks."""
    snapshots, left = divmod(cache_memory, interval * block_bytes + snapshot_bytes)
    return snapshots * interval + min(interval, left // block_bytes), snapshots


def plan_memory(
    layout: CacheLayout,
    config: EngineConfig,
    types: Types,
    cache_memory: int,
) -> MemoryPlan:
    """Split `cache_memory` into KV blocks and snapshot rows.

    A model without state has no rows. An explicit `prefix_cache_state_budget` is used as it is. An
    explicit `prefix_cache_state_interval` gives one snapshot per this many blocks. Otherwise,
    snapshots get half of the memory, or less if there would be more of them than blocks.

    Raises:
        ConfigError: too small; the message says which option to change.
    """
    assert config.block_size is not None
    block_bytes = layout.num_bytes("block", types.pools, config.block_size)
    snapshot_bytes = layout.num_bytes("row", types.pools)
    if not block_bytes:
        raise ConfigError("a model without attention layers is not supported")
    budget = config.prefix_cache_state_budget
    if not config.enable_prefix_caching or not layout.has_state:
        budget = 0
    if budget is not None:
        snapshots = budget
        blocks = (cache_memory - snapshots * snapshot_bytes) // block_bytes
    elif config.prefix_cache_state_interval is not None:
        interval = config.prefix_cache_state_interval
        blocks, snapshots = split_by_interval(cache_memory, block_bytes, snapshot_bytes, interval)
    else:
        # A position deeper than the KV needs no snapshot, so a row beyond one a block is idle.
        apiece = cache_memory // (block_bytes + snapshot_bytes)
        snapshots = min(cache_memory // 2 // snapshot_bytes, apiece)
        blocks = (cache_memory - snapshots * snapshot_bytes) // block_bytes
    drafts = 0 if config.speculative == "off" else config.speculative_tokens
    if blocks < MIN_BLOCKS:
        needed = snapshots * snapshot_bytes + MIN_BLOCKS * block_bytes
        raise ConfigError(
            f"cache_memory of {cache_memory} bytes leaves room for {max(0, blocks)} KV blocks of "
            f"{block_bytes} bytes beside {snapshots} snapshots of {snapshot_bytes} bytes; "
            f"raise cache_memory to at least {needed}, or lower prefix_cache_state_budget or "
            "block_size",
            param="cache_memory",
        )
    return MemoryPlan(
        cache_memory=cache_memory,
        block_size=config.block_size,
        block_bytes=block_bytes,
        snapshot_bytes=snapshot_bytes,
        num_blocks=blocks,
        num_snapshot_rows=snapshots,
        num_live_rows=config.max_num_seqs if layout.has_state else 0,
        update_bytes=layout.num_bytes("update", types.pools),
        num_updates=UpdateSlots.of(config.max_num_seqs, drafts).total if layout.has_state else 0,
    )


def live_bytes(
    layout: CacheLayout, config: EngineConfig, types: Types, sequences: int | None = None
) -> int:
    """Return what running sequences, `max_num_seqs` or so many, take beside the cache memory: live
    states and updates."""
    if not layout.has_state:
        return 0
    drafts = 0 if config.speculative == "off" else config.speculative_tokens
    count = sequences or config.max_num_seqs
    updates = UpdateSlots.of(count, drafts).total
    live = count * layout.num_bytes("row", types.pools)
    return live + updates * layout.num_bytes("update", types.pools)


def embedding_bytes(model: ModelSpec, types: Types) -> int:
    """Return the bytes of one media token's embedding, with its features; 0 for a model without
    vision."""
    return 0 if model.vision is None else model.embedding_width * types.vision.itemsize


def default_cache_memory(
    device: torch.device,
    ranks: int = 1,
    steps: StepMemory | None = None,
    *,
    live: int = 0,
    free: int | None = None,
    updates: int = 0,
) -> int:
    """Return the default cache memory of one rank.

    On a CPU this is its share of a quarter of the memory that is free beside the second set of
    weights that updates need, at most 4 GiB. On a GPU it is 95 %
    of the memory that is free there beside the measured steps and the live states; 85 % without
    measurements.

    Args:
        device: of the model.
        ranks: how many there are.
        steps: what steps take, on a GPU.
        live: bytes of `live_bytes`.
        free: bytes that are free on an absent GPU; None: asked.
        updates: bytes of a rank's second set of weights.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] if free is None else free
        if steps is None:
            return max(0, int((free - live) * RANKS_SHARE))
        return max(0, int((free - steps.total - live) * GPU_SHARE))
    beside = max(0, free_host_memory() - updates * ranks)
    return min(CPU_CEILING, beside // CPU_SHARE) // ranks


def check_pools(memory: MemoryPlan, ranks: int, device: torch.device) -> None:
    """Check the size of the pools; raise ConfigError if this machine can never provide it."""
    on_host = device.type == "cpu"
    most = host_memory() if on_host else torch.cuda.get_device_properties(device).total_memory
    total = memory.pool_bytes * (ranks if on_host else 1)
    if total > most:
        raise ConfigError(
            f"the cache of {_pools(memory)} needs {format_size(total)}, but this "
            f"{'process may use' if on_host else 'GPU has'} at most {format_size(most)}: lower "
            "cache_memory or max_num_seqs",
            param="cache_memory",
        )


@contextmanager
def named_shortage(memory: MemoryPlan) -> Iterator[None]:
    """Raise ConfigError, which names the sizes, if memory runs out in the block."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise ConfigError(
            f"there is not enough free memory for the cache of {_pools(memory)}: lower "
            "cache_memory or max_num_seqs",
            param="cache_memory",
        ) from None


def _pools(memory: MemoryPlan) -> str:
    """Name the sizes of the pools."""
    text = f"cache_memory = {format_size(memory.cache_memory)}"
    besides = memory.pool_bytes - memory.cache_memory
    return f"{text} and {format_size(besides)} of live states" if besides else text


def check_host_cache(num_bytes: int) -> None:
    """Check the size of the host tier; raise ConfigError if this machine can never provide it."""
    most = host_memory()
    if num_bytes > most:
        raise ConfigError(
            f"host_cache_memory is {format_size(num_bytes)}, but this process may use at most "
            f"{format_size(most)}",
            param="host_cache_memory",
        )


def host_memory() -> int:
    """Return the bytes of the machine's memory, or of its control group's limit."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _GROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdigit() else whole


def free_host_memory() -> int:
    """Return the bytes left for this process to allocate."""
    free, space = _free_memory(), free_address_space()
    return free if space is None else min(free, space)


def _free_memory() -> int:
    """Return the bytes of memory that is free, or would be."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30
