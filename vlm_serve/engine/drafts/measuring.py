"""Measures what rows cost a step, on the machine that will make the steps."""

from __future__ import annotations

import math
import time

import torch

from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.metadata import DecodeMeta, VerifyMeta
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch
from vlm_serve.models.cache_layout import CacheTensors

_REPEATS = 3


def measure_rows(
    model: Model, caches: CacheTensors, *, most_sequences: int, most_tokens: int
) -> list[tuple[int, float]]:
    """(rows, seconds) of steps of drafted tokens. The pools must be unused yet.

    Args:
        model: what computes.
        caches: its pools, with room for updates.
        most_sequences: that run at once.
        most_tokens: of a slice of drafts.
    """
    sizes = [1]
    while sizes[-1] * 2 <= min(most_sequences * most_tokens, caches.num_blocks * caches.block_size):
        sizes.append(sizes[-1] * 2)
    for kind in ("recurrent", "conv"):
        if caches.num_rows:
            caches[kind][:most_sequences].zero_()
    least = math.inf
    points: list[tuple[int, float]] = []
    with launching_on(caches.device):
        for rows in reversed(sizes):
            batch = _batch(rows, caches, most_tokens).to(caches.device)
            # Fewer rows take no longer: what does, has been disturbed.
            least = min(least, *(_seconds(model, caches, batch) for _ in range(_REPEATS)))
            points.append((rows, least))
    return points[::-1]


def _seconds(model: Model, caches: CacheTensors, batch: ForwardBatch) -> float:
    begin = time.perf_counter()
    model.forward(batch, caches).logits[0, 0].item()
    return time.perf_counter() - begin


def _batch(rows: int, caches: CacheTensors, most_tokens: int) -> ForwardBatch:
    """Tokens 0 at positions 0, 1, ..., as slices of drafts; one alone as a decode token."""
    lengths = [min(most_tokens, rows - first) for first in range(0, rows, most_tokens)]
    size = caches.block_size
    blocks = [-(-length // size) for length in lengths]
    tables, slots, offsets = [], [], [0]
    for index, length in enumerate(lengths):
        first = sum(blocks[:index]) % caches.num_blocks
        table = tuple((first + place) % caches.num_blocks for place in range(blocks[index]))
        tables.append(table)
        slots += [table[at // size] * size + at % size for at in range(length)]
        offsets.append(offsets[-1] + length)
    own = tuple(range(len(lengths))) if caches.num_rows else (-1,) * len(lengths)
    verify = VerifyMeta(
        cu_seqlens=tuple(offsets),
        starts=(0,) * len(lengths),
        block_tables=tuple(tables),
        rows=own,
        updates=tuple(index * most_tokens if caches.num_rows else -1 for index in own),
        folded=(0,) * len(lengths),
    )
    decode = DecodeMeta(tuple(tables), (1,), own, own, (-1,)) if rows == 1 else None
    return ForwardBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.tensor([at for length in lengths for at in range(length)]).expand(3, -1),
        slots=torch.tensor(slots),
        decode=decode,
        prefill=None,
        media=(),
        logit_rows=torch.arange(rows),
        verify=verify if decode is None else None,
    )
