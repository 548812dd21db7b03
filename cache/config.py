"""Settings of the prefix cache, fixed at start-up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes and switches of a `PrefixCache`. The engine validates user input.

    Attributes:
        num_blocks: physical KV blocks in the pool.
        block_size: tokens per block.
        num_live_rows: most state rows that running requests may hold at once.
        num_snapshot_rows: state rows beyond the live ones. The pool has the sum of both. Snapshots
            may borrow idle live rows and return them on demand.
        has_state: False for a model without state layers: no rows, KV alone decides.
        enabled: False: requests get blocks and rows, but nothing is matched or published.
        min_snapshot_gain: blocks that a junction snapshot must save, and a join; see
            `least_gain`.
        block_bytes, snapshot_bytes: size of one KV block and one state row, for listings.
        logprob_bytes: most bytes of kept prompt log-probabilities, in addition to the pools.
        learned_places: regular snapshots follow from what was learned of a tenant's prompts; False:
            from the fixed interval alone.
        ghost_entries: evicted keys remembered to explain misses; None: one per block.
        exact_only: publish only computations of prefill: answers are shared with nobody, and no
            lease continues in KV that another arithmetic wrote.
    """

    num_blocks: int
    block_size: int
    num_live_rows: int = 0
    num_snapshot_rows: int = 0
    has_state: bool = True
    enabled: bool = True
    min_snapshot_gain: int = 4
    block_bytes: int = 1
    snapshot_bytes: int = 1
    logprob_bytes: int = 64 << 20
    learned_places: bool = True
    ghost_entries: int | None = None
    exact_only: bool = False

    def __post_init__(self) -> None:
        assert self.num_blocks > 0, "num_blocks must be positive"
        assert self.block_size > 0, "block_size must be positive"
        assert self.num_live_rows > 0 or not self.has_state, "a model with state needs live rows"
        assert self.num_snapshot_rows >= 0, "num_snapshot_rows must not be negative"
        assert self.min_snapshot_gain > 0, "min_snapshot_gain must be positive"
        assert self.block_bytes > 0, "sizes must be positive"
        assert self.snapshot_bytes > 0 or not self.has_state, "sizes must be positive"
        assert self.logprob_bytes >= 0, "sizes must not be negative"
        assert self.ghost_entries is None or self.ghost_entries >= 0

    @property
    def num_rows(self) -> int:
        """State rows of the pool: live and snapshot rows together; 0 without state layers."""
        return self.num_live_rows + self.num_snapshot_rows if self.has_state else 0

    @property
    def least_gain(self) -> int:
        """Tokens that a junction, message or regular snapshot must save: a single block's if it
        takes less memory than that, as with short convolutions."""
        small = self.has_state and self.snapshot_bytes < self.block_bytes
        return self.block_size if small else self.min_snapshot_gain * self.block_size
