"""Verify slices: a sampled token and the tokens that may follow it, each computed as a decode
token."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace

from vlm_serve.engine.plan import Slice
from vlm_serve.engine.queues import SequenceQueues


def verify_capacity(queues: SequenceQueues, item: Slice, state_interval: int) -> int:
    """Return the number of tokens that fit behind a decode token. The limits are the answer's
    length, free blocks and updates. Another limit is the next position that needs a state snapshot,
    since only a decode token leaves one.

    Args:
        state_interval: tokens between state snapshots while decoding; 0 means none.
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
    """Return a planned decode token extended by as many drafts as are allowed. Return it unchanged
    if no draft is allowed or no blocks are free."""
    sequence = queues[item.sequence]
    lease, cache = sequence.lease, queues.cache
    assert lease is not None and item.src_row == item.dst_row
    # Other drafts may have taken updates or blocks since the capacity was computed.
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
