"""What compiled kernels have in common on the side of Python: the records that describe a packed
step and rows of a tensor, as the headers in `native/` declare them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import cast

import torch

from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.kernels.native_layout import constant, struct

LANES = constant("LANES")
"""Compiled code works on so many numbers at a time; a row is a whole number of them."""
DTYPES = (torch.float32, torch.bfloat16)


def bits(x: torch.Tensor) -> int:
    """Which of the two dtypes it is."""
    return 8 * x.itemsize


Packed = struct("Packed")


def packed(meta: PrefillMeta | DecodeMeta) -> ctypes.Structure:
    """The step's sequences; the arrays are made once per step and stay with its metadata."""
    if "compiled" not in meta.plans:
        rows = [array("q", values) for values in (offsets(meta), meta.src_rows, meta.dst_rows)]
        meta.plans["compiled"] = (*rows, array("q", _snapshot_rows(meta)))
    arrays = cast("tuple[array[int], ...]", meta.plans["compiled"])
    addresses = (each.buffer_info()[0] for each in arrays)
    return Packed(len(meta), torch.get_num_threads(), *addresses)


def offsets(meta: PrefillMeta | DecodeMeta) -> Sequence[int]:
    """Where each sequence's tokens begin, and where the last one's end."""
    return range(len(meta) + 1) if isinstance(meta, DecodeMeta) else meta.cu_seqlens


def tables(
    meta: PrefillMeta | DecodeMeta | VerifyMeta,
) -> tuple[array[int], list[array[int]]]:
    """The addresses of the sequences' block tables, and what lies there: the tables themselves
    where they are arrays of int32, which nobody copies however long they are."""
    own = [
        each if isinstance(each, array) and each.typecode == "i" else array("i", each)
        for each in meta.block_tables
    ]
    return array("q", [each.buffer_info()[0] for each in own]), own


def _snapshot_rows(meta: PrefillMeta | DecodeMeta) -> Sequence[int]:
    """For every token the row that receives the state after it, -1 for none."""
    if isinstance(meta, DecodeMeta):
        return meta.snapshot_rows
    rows = [-1] * meta.num_tokens
    for sequence, chunk, row in meta.snapshots:
        rows[meta.chunk_ends[sequence][chunk] - 1] = row
    return rows


Rows = struct("Rows")


def knows_rows(x: torch.Tensor) -> bool:
    """Whether `rows` can describe a tensor: dense rows of whole vectors."""
    whole = x.shape[-1] % LANES == 0 and x.stride(-1) == 1
    return whole and x.dtype in DTYPES and x.ndim in (2, 3)


def rows(x: torch.Tensor, out: torch.Tensor | None = None) -> ctypes.Structure:
    """A tensor's rows, and the contiguous one of its shape that receives the result."""
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
