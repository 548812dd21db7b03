"""Checks of the engine's options beyond those of each value: conflicts, and limits of media."""

from __future__ import annotations

import re

BLOCK_SIZES = (16, 32, 64, 128)
_LIMIT = re.compile(r"(image|video)\s*=\s*(\d{1,6})", re.ASCII)


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


def read_media_limits(text: str) -> dict[str, int] | None:
    """Return the most media of a prompt by modality; None if the text is malformed.

    Args:
        text: such as `image=4,video=1`, or the JSON object that vLLM takes.
    """
    limits: dict[str, int] = {}
    text = text.strip()
    if text.startswith("{"):
        text = text.strip("{}").replace('"', "").replace(":", "=")
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _LIMIT.fullmatch(part)
        if found is None or found[1] in limits:
            return None
        limits[found[1]] = int(found[2])
    return limits
