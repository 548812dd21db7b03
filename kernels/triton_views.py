"""What kernels take as one argument: tensors with their strides, tables of a step, constants.

Triton flattens a named tuple into its parts, so compiled code is that of separate arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl

from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta
from vlm_serve.kernels.triton_support import (
    current_target,
    decode_tables,
    dot_dtype,
    interpreted,
    prefill_tables,
)


class Rows(NamedTuple):
    """A tensor whose first dimension has a stride, and all behind it none of their own."""

    at: torch.Tensor
    stride: int


class Heads(NamedTuple):
    """A tensor `[tokens, heads, size]` with the strides of the first two."""

    at: torch.Tensor
    token: int
    head: int


class Moves(NamedTuple):
    """State rows of the sequences of a decode step; see `decode_tables`."""

    src: torch.Tensor
    dst: torch.Tensor
    snapshot: torch.Tensor


class Slices(NamedTuple):
    """Tables of the sequences and chunks of a prefill; see `prefill_tables`."""

    cu_seqlens: torch.Tensor
    starts: torch.Tensor
    src_rows: torch.Tensor
    dst_rows: torch.Tensor
    chunk_bounds: torch.Tensor
    chunk_sequence: torch.Tensor
    chunk_snapshot: torch.Tensor
    first_chunk: torch.Tensor
    tail_stop: torch.Tensor
    tail_row: torch.Tensor
    first_tail: torch.Tensor


_Constants = TypeVar("_Constants", bound=NamedTuple)


class Dots(NamedTuple):
    """Constants of products: the operands' type, and the precision of float32."""

    dtype: Any
    precision: str


def rows(x: torch.Tensor | None, instead: torch.Tensor | None = None) -> Rows:
    """Return a tensor with its stride. Any pointer takes the place of what there is not, and is
    never read."""
    if x is None:
        assert instead is not None
        return Rows(instead, 0)
    return Rows(x, x.stride(0))


def heads(x: torch.Tensor) -> Heads:
    """Return a tensor `[tokens, heads, size]` with its strides."""
    return Heads(x, x.stride(0), x.stride(1))


def moves(meta: DecodeMeta, device: torch.device) -> Moves:
    """Return the state rows of a decode step."""
    tables = decode_tables(meta, device)
    return Moves(tables["src_rows"], tables["dst_rows"], tables["snapshot_rows"])


def slices(meta: PrefillMeta, device: torch.device) -> Slices:
    """Return the tables of a prefill."""
    tables = prefill_tables(meta, device)
    return Slices(*(tables[name] for name in Slices._fields))


def dots(dtype: torch.dtype) -> Dots:
    """Return the constants of products of tensors of a type."""
    return constants(Dots, dot_dtype(dtype), current_target().dot_precision)


def constants(kind: type[_Constants], *values: object) -> _Constants:
    """Return a named tuple of constants, which kernels are compiled for; the interpreter computes
    with plain ones."""
    return kind._make(values if interpreted() else map(tl.constexpr, values))
