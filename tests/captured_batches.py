"""Plain batches from the tables of captured ones, for ops that take a step's values from the host.

A captured step's tables lie at fixed addresses, and its host values are those of no step. Triton
kernels read the tables. Torch's ops read host values, so these are made from the tables when the
step is computed: torch then computes what the kernels would, a hundred times faster than their
interpreter.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.models.batch import ForwardBatch


def plain_batch(batch: ForwardBatch, block_size: int) -> ForwardBatch | None:
    """Return a captured batch's step without its padding; None if there is nothing else.

    Args:
        batch: with the tables of `StepBuffers`.
        block_size: tokens per KV block.
    """
    if batch.verify is not None:
        return _with_drafts(batch, batch.verify, block_size)
    assert batch.decode is not None
    prefill = None if batch.prefill is None else _prefill(batch.prefill, block_size)
    decode, room = _decode(batch.decode, block_size), len(batch.decode)
    decodes, prompt = len(decode), 0 if prefill is None else prefill.num_tokens
    if not decodes and not prompt:
        return None
    packed = torch.tensor([*range(decodes), *range(room, room + prompt)])
    rows = batch.logit_rows
    if batch.prefill is None:
        wanted = rows[:decodes]
    else:
        wanted = _wanted(torch.where(rows < room, rows, rows - (room - decodes)), decodes)
    return ForwardBatch(
        token_ids=batch.token_ids[packed],
        positions=batch.positions[:, packed],
        slots=batch.slots[packed],
        decode=decode if decodes else None,
        prefill=prefill if prompt else None,
        media=(),
        logit_rows=wanted,
        deterministic=batch.deterministic,
    )


def _with_drafts(batch: ForwardBatch, verify: VerifyMeta, block_size: int) -> ForwardBatch | None:
    decode = None if batch.decode is None else _decode(batch.decode, block_size)
    decodes, first = (0, 0) if decode is None else (len(decode), len(batch.decode or ()))
    drafts, packed = _verify(verify, block_size), list(range(decodes))
    room = verify.num_tokens // len(verify)
    for place, (begin, end) in enumerate(pairwise(drafts.cu_seqlens)):
        packed += range(first + place * room, first + place * room + end - begin)
    if not packed:
        return None
    return ForwardBatch(
        token_ids=batch.token_ids[packed],
        positions=batch.positions[:, packed],
        slots=batch.slots[packed],
        decode=decode if decodes else None,
        prefill=None,
        media=(),
        logit_rows=torch.arange(len(packed)),
        verify=drafts if len(drafts) else None,
        deterministic=batch.deterministic,
    )


def _verify(meta: VerifyMeta, block_size: int) -> VerifyMeta:
    """Leave out padding: tokens with one key."""
    tables = {name: table.tolist() for name, table in meta.tensors.items()}
    room, offsets, starts, blocks = meta.num_tokens // len(meta), [0], list[int](), []
    for place, table in enumerate(tables["block_tables"]):
        lengths = [each for each in tables["kv_lens"][place * room :][:room] if each > 1]
        if lengths:
            offsets.append(offsets[-1] + len(lengths))
            starts.append(lengths[0] - 1)
            blocks.append(tuple(table[: -(-lengths[-1] // block_size)]))
    rows = tables["slices"][: len(starts)]
    return VerifyMeta(
        cu_seqlens=tuple(offsets),
        starts=tuple(starts),
        block_tables=tuple(blocks),
        rows=tuple(row[0] for row in rows),
        updates=tuple(row[1] for row in rows),
        folded=tuple(row[2] for row in rows),
    )


def _wanted(rows: torch.Tensor, decodes: int) -> torch.Tensor:
    """Leave out the zeros of padding: wanted rows ascend. One row is always left, since a step that
    wants none looks like one that wants the first."""
    return rows[: max(1, decodes, int(rows.count_nonzero()) + int(rows[0] == 0))]


def _decode(meta: DecodeMeta, block_size: int) -> DecodeMeta:
    """Leave out padding: sequences of one token, which no decode step has."""
    tables = {name: table.tolist() for name, table in meta.tensors.items()}
    count = sum(length > 1 for length in tables["kv_lens"])
    lengths = tables["kv_lens"][:count]
    blocks = zip(tables["block_tables"], lengths, strict=False)
    return DecodeMeta(
        block_tables=tuple(tuple(row[: -(-length // block_size)]) for row, length in blocks),
        kv_lens=tuple(lengths),
        src_rows=tuple(tables["src_rows"][:count]),
        dst_rows=tuple(tables["dst_rows"][:count]),
        snapshot_rows=tuple(tables["snapshot_rows"][:count]),
    )


def _prefill(meta: PrefillMeta, block_size: int) -> PrefillMeta:
    """Leave out padding: sequences of no tokens, behind all others."""
    tables = {name: table.tolist() for name, table in meta.tensors.items()}
    offsets, bounds = tables["cu_seqlens"], tables["chunk_bounds"]
    count = sum(begin < end for begin, end in pairwise(offsets))
    chunks = list(pairwise(tables["first_chunk"][: count + 1]))
    ends = [start + offsets[i + 1] - offsets[i] for i, start in enumerate(tables["starts"][:count])]
    return PrefillMeta(
        cu_seqlens=tuple(offsets[: count + 1]),
        starts=tuple(tables["starts"][:count]),
        block_tables=tuple(
            tuple(row[: -(-end // block_size)])
            for row, end in zip(tables["block_tables"], ends, strict=False)
        ),
        src_rows=tuple(tables["src_rows"][:count]),
        dst_rows=tuple(tables["dst_rows"][:count]),
        chunk_ends=tuple(tuple(bounds[first + 1 : last + 1]) for first, last in chunks),
        snapshots=tuple(
            (i, chunk - first, tables["chunk_snapshot"][chunk])
            for i, (first, last) in enumerate(chunks)
            for chunk in range(first, last)
            if tables["chunk_snapshot"][chunk] >= 0
        ),
    )
