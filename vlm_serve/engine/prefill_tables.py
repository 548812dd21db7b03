"""Tables of the prompts of a captured step, see `step_buffers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vlm_serve.engine.step_sizes import SequenceLimits, StepSize
from vlm_serve.engine.step_tables import Table, Tables
from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.metadata import PrefillMeta
from vlm_serve.kernels.triton_support import prefill_parts, query_tiles

TileForm = tuple[int, int]
"""Rows of a query tile in attention, and number of heads that share a key."""
_TILES = "tile_sequence/{}/{}", "tile_row/{}/{}"
"""Names of attention's tables, by tile form."""
_OFFSETS = ("cu_seqlens", "first_chunk", "first_tail", "chunk_bounds")
"""Tables whose padding is their last value: all that follows is empty."""


def tile_forms(tensors: Mapping[str, torch.Tensor]) -> tuple[TileForm, ...]:
    """Return the tile forms whose tables attention has added to a step."""
    names = [name.split("/") for name in tensors if name.startswith("tile_sequence/")]
    return tuple((int(rows), int(group)) for _, rows, group in names)


class PrefillTables:
    """Tables of prompts, with one more sequence that is always empty.

    Args:
        size, limits: maximum sizes of steps.
        forms: attention's tile forms. Without them, attention makes its own tables for the largest
            step, in the first forward.

    Attributes:
        tables: those of a step; all are int32.
    """

    def __init__(
        self, size: StepSize, limits: SequenceLimits, forms: Sequence[TileForm] = ()
    ) -> None:
        self._size, self._limits = size, limits
        self._largest = _largest(size, limits)
        self._tiles = {form: len(query_tiles(self._largest, *form)[0]) for form in forms}
        rows, scratch = size.prompts + 1, limits.scratch_row
        columns: list[tuple[str, int, int]] = [
            *((name, rows + 1, 0) for name in ("cu_seqlens", "first_chunk", "first_tail")),
            ("starts", rows, 0),
            ("src_rows", rows, -1),
            ("dst_rows", rows, scratch),
            ("chunk_bounds", size.chunks + 1, 0),
            ("chunk_sequence", size.chunks, 0),
            ("chunk_snapshot", size.chunks, -1),
            ("tail_stop", size.tails, 0),
            ("tail_row", size.tails, scratch),
        ]
        for form, count in self._tiles.items():
            paddings = zip(_TILES, (size.prompts, 0), strict=True)
            columns += [(name.format(*form), count, padding) for name, padding in paddings]
        self.tables: Tables = {
            **{name: Table(torch.int32, (count,), padding) for name, count, padding in columns},
            "block_tables": Table(torch.int32, (rows, limits.max_blocks)),
        }

    def meta(self, fixed: Mapping[str, torch.Tensor]) -> PrefillMeta:
        """Return the arguments of ops; see `StepBuffers`."""
        self._largest.tensors.update(fixed)
        return self._largest

    def accepts(self, meta: PrefillMeta) -> bool:
        """Return True if a prefill's sequences, chunks, states and tiles fit."""
        size = self._size
        return (
            meta.num_tokens <= size.tokens
            and len(meta) <= size.prompts
            and sum(map(len, meta.chunk_ends)) <= size.chunks
            and len(meta) + len(meta.snapshots) <= size.tails
            and max(map(len, meta.block_tables)) <= self._limits.max_blocks
            and all(
                len(query_tiles(meta, *form)[0]) <= count for form, count in self._tiles.items()
            )
        )

    def write(self, staged: Mapping[str, torch.Tensor], meta: PrefillMeta | None) -> None:
        """Write a prefill that `accepts` allows, or none."""
        if meta is None:
            meta = PrefillMeta((0,), (), (), (), (), ())
        parts = prefill_parts(meta)
        for form in self._tiles:
            tiles = zip(_TILES, query_tiles(meta, *form), strict=True)
            parts |= {name.format(*form): values for name, values in tiles}
        for name in staged.keys() - {"block_tables"}:
            table, values = staged[name], parts[name]
            table[: len(values)] = torch.tensor(values, dtype=table.dtype)
            if name in _OFFSETS:
                table[len(values) :] = values[-1]
        for row, used in enumerate(meta.block_tables):
            staged["block_tables"][row].numpy()[: len(used)] = used


def _largest(size: StepSize, limits: SequenceLimits) -> PrefillMeta:
    """Return the prefill with the most tiles: one token in every sequence but the last, which has
    the rest."""
    count = size.prompts
    offsets = (*range(count), size.tokens, size.tokens)
    cuts = range(count - 1, size.tokens, MAX_CHUNK)
    blocks = max(limits.max_blocks, -(-size.tokens // limits.block_size))
    return PrefillMeta(
        cu_seqlens=offsets,
        starts=(0,) * (count + 1),
        block_tables=((0,) * blocks,) * (count + 1),
        src_rows=(-1,) * (count + 1),
        dst_rows=tuple(range(count + 1)),
        chunk_ends=(*((end,) for end in range(1, count)), (*cuts[1:], size.tokens), ()),
        fixed=True,
    )
