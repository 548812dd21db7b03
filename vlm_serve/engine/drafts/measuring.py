"""Measures what rows cost a step, on the machine that will make the steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from vlm_serve.kernels.dispatch import launching_on
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.models import Model
from vlm_serve.models.batch import ForwardBatch, ForwardOutput
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
    most = min(most_sequences * most_tokens, caches.num_blocks * caches.block_size)
    for kind in ("recurrent", "conv"):
        if caches.num_rows:
            caches[kind][:most_sequences].zero_()
    with launching_on(caches.device):
        return _points(most, lambda rows: _step(model, caches, rows, most_tokens))


def measure_passes(
    model: Model, caches: CacheTensors, *, most_sequences: int
) -> list[tuple[int, float]]:
    """(sequences, seconds) of passes of the model's layer for drafts. The pools must be unused yet,
    and have a block for each sequence."""
    with launching_on(caches.device):
        return _points(
            min(most_sequences, caches.num_blocks), lambda count: _pass(model, caches, count)
        )


def _points(
    most: int, make: Callable[[int], Callable[[], ForwardOutput]]
) -> list[tuple[int, float]]:
    """Times what is made for 1, 2, 4, ... up to `most`."""
    sizes = [1]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    least = math.inf
    points: list[tuple[int, float]] = []
    for size in reversed(sizes):
        run = make(size)
        # Less takes no longer: what does, has been disturbed.
        least = min(least, *(_seconds(run) for _ in range(_REPEATS)))
        points.append((size, least))
    return points[::-1]


def _seconds(run: Callable[[], ForwardOutput]) -> float:
    begin = time.perf_counter()
    run().logits.argmax(-1).tolist()
    return time.perf_counter() - begin


def _step(
    model: Model, caches: CacheTensors, rows: int, most_tokens: int
) -> Callable[[], ForwardOutput]:
    batch = _batch(rows, caches, most_tokens).to(caches.device)
    return lambda: model.forward(batch, caches)


def _pass(model: Model, caches: CacheTensors, count: int) -> Callable[[], ForwardOutput]:
    """Each sequence's second token, with one key."""
    own = tuple(range(count))
    batch = ForwardBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.zeros(3, count, dtype=torch.int64),
        slots=torch.tensor([block * caches.block_size + 1 for block in own]),
        decode=None,
        prefill=PrefillMeta(
            cu_seqlens=(*own, count),
            starts=(0,) * count,
            block_tables=tuple((block,) for block in own),
            src_rows=(-1,) * count,
            dst_rows=(-1,) * count,
            chunk_ends=tuple((place + 1,) for place in own),
        ),
        media=(),
        logit_rows=torch.arange(count),
    ).to(caches.device)
    before = torch.zeros(count, model.spec.hidden_size, dtype=model.dtype, device=caches.device)
    return lambda: model.draft(batch, before, caches)


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
