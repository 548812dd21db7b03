"""Options of the engine that do not go together."""

from __future__ import annotations

BLOCK_SIZES = (16, 32, 64, 128)


def conflicts_of(
    block_size: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_cache_decode_state_interval: int,
) -> list[str]:
    """Return the conflicts between options whose values are valid, one line each."""
    problems = []
    # Unknown before the checkpoint is read; the smallest block demands the least.
    block_size = block_size or min(BLOCK_SIZES)
    least = max_num_seqs + block_size
    if max_num_batched_tokens < least:
        problems.append(
            f"max_num_batched_tokens must be at least max_num_seqs + block_size = {least}, "
            f"got {max_num_batched_tokens}"
        )
    if prefix_cache_decode_state_interval % block_size:
        problems.append(
            f"prefix_cache_decode_state_interval must be a multiple of the block size "
            f"{block_size}, got {prefix_cache_decode_state_interval}"
        )
    return problems
