"""Arguments shared by compiled kernels: a packed step and the rows of a tensor.

The headers in `native/` declare the structs.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import cast

import torch

from vlm_serve.kernels.metadata import AnyMeta, DecodeMeta, PrefillMeta
from vlm_serve.kernels.native_layout import constant, struct

LANES = constant("LANES")
"""Vector length of compiled code; the width of a row is a multiple of it."""
DTYPES = (torch.float32, torch.bfloat16)


def bits(x: torch.Tensor) -> int:
    """Return 32 for float32 and 16 for bfloat16."""
    return 8 * x.itemsize


Packed = struct("Packed")


def packed(meta: PrefillMeta | DecodeMeta) -> ctypes.Structure:
    """Return the step's sequences; the arrays are made once per step and cached in its metadata."""
    if "compiled" not in meta.plans:
        rows = (meta.cu_seqlens, meta.src_rows, meta.dst_rows, snapshot_rows(meta))
        meta.plans["compiled"] = tuple(array("q", values) for values in rows)
    arrays = cast("tuple[array[int], ...]", meta.plans["compiled"])
    addresses = (numbers.buffer_info()[0] for numbers in arrays)
    return Packed(len(meta), torch.get_num_threads(), *addresses)


def tables(meta: AnyMeta) -> tuple[array[int], list[array[int]]]:
    """Return the addresses of the sequences' block tables, and the owners of their memory.

    int32 arrays are used in place, however long they are.
    """
    tables = [
        table if isinstance(table, array) and table.typecode == "i" else array("i", table)
        for table in meta.block_tables
    ]
    return array("q", [table.buffer_info()[0] for table in tables]), tables


def snapshot_rows(meta: AnyMeta) -> Sequence[int]:
    """Return for every token the row for a snapshot of the state after it, or -1."""
    if isinstance(meta, DecodeMeta):
        return meta.snapshot_rows
    rows = [-1] * meta.num_tokens
    if isinstance(meta, PrefillMeta):
        for sequence, chunk, row in meta.snapshots:
            rows[meta.chunk_ends[sequence][chunk] - 1] = row
    return rows


Rows = struct("Rows")


def knows_rows(x: torch.Tensor) -> bool:
    """Return True if `rows` can describe a tensor: dense rows of whole vectors."""
    whole = x.shape[-1] % LANES == 0 and x.stride(-1) == 1
    return whole and x.dtype in DTYPES and x.ndim in (2, 3)


def rows(x: torch.Tensor, out: torch.Tensor | None = None) -> ctypes.Structure:
    """Describe a tensor's rows, and the contiguous output of its shape."""
    heads, head_stride = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)
    return Rows(
        tokens=x.shape[0],
        heads=heads,
        width=x.shape[-1],
        stride=x.stride(0),
        head_stride=head_stride,
        threads=torch.get_num_threads(),
        x=x.data_ptr(),
        out=None if out is None else out.data_ptr(),
    )
