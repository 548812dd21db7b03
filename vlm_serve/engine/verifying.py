"""Slices that verify: a sampled token and what may follow it, each computed as a decode token."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace

from vlm_serve.engine.plan import Slice
from vlm_serve.engine.queues import SequenceQueues


def verify_capacity(queues: SequenceQueues, item: Slice, state_interval: int) -> int:
    """Tokens that fit behind a decode token: into the answer, the free blocks and updates and up to
    the next position whose state is wanted, which only a decode token leaves.

    Args:
        state_interval: tokens between state snapshots while decoding; 0: none.
    """
    sequence, cache = queues[item.sequence], queues.cache
    lease, updates = sequence.lease, queues.update_capacity(sequence)
    assert lease is not None
    blocks = len(lease.blocks) + cache.free_block_count
    limits = [sequence.answer.tokens_left(sequence.num_generated) - 1]
    limits.append(blocks * cache.config.block_size - item.end)
    if updates is not None:
        limits.append(updates - 1)
    if state_interval:
        limits.append(-item.end % state_interval - 1)
    return min(limits)


def verify_slice(queues: SequenceQueues, item: Slice, drafts: Tokens[int]) -> Slice:
    """A planned decode token with drafts behind it, as many as may come; the slice as it is if
    there are none, or no blocks for them."""
    sequence = queues[item.sequence]
    lease, cache = sequence.lease, queues.cache
    assert lease is not None and item.src_row == item.dst_row
    # Other drafts may have taken places for updates in the meantime, or blocks.
    updates = queues.update_capacity(sequence)
    drafts = drafts if updates is None else drafts[: max(0, updates - 1)]
    tasks = sequence.draft_tasks(item.samples[0], drafts)
    tokens = tuple([task.draft for task in tasks if task.draft is not None])
    end = item.end + len(tokens)
    fits = -(-end // cache.config.block_size) <= len(lease.blocks) + cache.free_block_count
    if not tokens or not fits:
        return item
    grown = cache.grow(lease, end)
    assert grown, "there are free blocks"
    return replace(
        item,
        kind="verify",
        token_ids=item.token_ids + tokens,
        end=end,
        blocks=tuple(lease.blocks[item.first_block :]),
        samples=tasks,
        updates=queues.take_updates(sequence, 1 + len(tokens)),
        pending=sequence.pending,
    )
