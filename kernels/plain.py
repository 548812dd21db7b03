"""What the plain implementations of ops share.

Each op has one in its `reference.py`: it computes on a CPU without compiled kernels, and all others
are compared with it. It is written to be read, so it may be slow. An element's or a token's bits
depend on its own sequence alone, but those of products also on the rows beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta


def widened(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type that is computed in: float32, or float64 of float64, for
    tests."""
    return x if x.dtype == torch.float64 else x.float()


def sequences(
    meta: PrefillMeta | DecodeMeta,
) -> Iterator[tuple[int, int, int, list[tuple[int, int]]]]:
    """Yield each sequence of a step with state rows: its first packed token and the one behind its
    last, its source row, and (token, row) of every row that takes the state before this token."""
    if isinstance(meta, DecodeMeta):
        rows = zip(meta.src_rows, meta.dst_rows, meta.snapshot_rows, strict=True)
        for token, (source, target, snapshot) in enumerate(rows):
            kept = [(token + 1, row) for row in (target, snapshot) if row >= 0]
            yield token, token + 1, source, kept
        return
    for index, (begin, end) in enumerate(pairwise(meta.cu_seqlens)):
        ends = meta.chunk_ends[index]
        kept = [(ends[chunk], row) for owner, chunk, row in meta.snapshots if owner == index]
        yield begin, end, meta.src_rows[index], [*kept, (end, meta.dst_rows[index])]
