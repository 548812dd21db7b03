"""Identity of prefixes: cut points, block keys and tail keys (design, sections 4 and 5).

Stub of the interface; the implementation follows.
"""

from __future__ import annotations

from collections.abc import Sequence


class PromptKeys:
    """Cut points and chained BLAKE3 keys of a token sequence that may still grow.

    Attributes:
        block_size: tokens per block.
        block_keys: one 32-byte key per full block.
        cuts: all cut points (multiples of the block size, span ends, positions after an end-of-turn
            token) in ascending order, 0 excluded, up to the current length.
        tails: cut point -> 32-byte key, for the cut points that are no multiple of the block size.
        span_bounds: (start, end) of every media span.
    """

    block_size: int
    root: bytes
    block_keys: list[bytes]
    cuts: list[int]
    tails: dict[int, bytes]
    span_bounds: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        """Number of tokens covered."""
        raise NotImplementedError

    def fork(self) -> PromptKeys:
        """An independent copy that can be extended (the prompt's own stays as it is)."""
        raise NotImplementedError

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends text tokens (what a request generates)."""
        raise NotImplementedError

    def inside_span(self, position: int) -> bool:
        """True if `start < position < end` for a media span."""
        raise NotImplementedError

    def last_cut(self, limit: int) -> int:
        """The deepest cut point <= limit that lies strictly inside no span, else 0."""
        raise NotImplementedError
