"""Projections: `x @ weight.T + bias` with a fused activation, product or sum on the output.

A `Linear` owns its weight's format, its layout in memory and its arithmetic.

    dense.py           float32, bfloat16 and float16 weights, packed for compiled CPU code
    torch_dense.py     the same weights multiplied by torch: GPUs, and CPUs without a compiler
    torch_quantised.py codes multiplied by Triton on GPUs and by torch on CPUs without a compiler
    packed_codes.py    codes of e4m3, and of 4, 6 or 8 bits, packed for compiled CPU code
    joined.py          weights of several formats side by side
    quantising.py      quantisation of plain weights
    low_rank.py        adapters' changes of products; low_rank_*.py: on a GPU
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import cast

import torch

from vlm_serve.kernels.linear.base import (
    Activation,
    Linear,
    Part,
    Shard,
    Source,
    WeightRecord,
    shape,
    stacked,
)
from vlm_serve.kernels.linear.codes import Codes, Float8Codes, IntegerCodes
from vlm_serve.kernels.linear.dense import PackedDense
from vlm_serve.kernels.linear.joined import Joined
from vlm_serve.kernels.linear.packed_codes import PackedFloat8, PackedIntegers, packable
from vlm_serve.kernels.linear.runs import runs
from vlm_serve.kernels.linear.torch_dense import TorchDense
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised

__all__ = ["Activation", "Linear", "Part", "Shard", "Source", "WeightRecord", "dense", "load"]


def load(
    source: Source,
    parts: list[Part],
    bias: list[Part] | None = None,
    shard: Shard | None = None,
) -> Linear:
    """Load several tensors of one input, stacked by rows, as one projection.

    Neighbours in the same format become one weight. If there are several weights, they stay side
    by side.

    Args:
        source: source of the tensors; it also names device and kernels.
        parts: the rows, in their order; all of one depth.
        bias: parts of the bias, as many rows, from one-dimensional tensors.
        shard: this rank's part of every row or of all rows.

    Raises:
        CheckpointError: from the source.
    """
    offsets = stacked(source, bias or [], shard)
    found, first = [], 0
    for run in runs(source, parts, shard):
        columns, depth = shape(run.parts, shard)
        own = None if offsets is None else offsets[first : first + columns]
        if run.kind is None:
            dense_pieces = (piece for part in run.parts for piece in part.pieces(source, shard))
            weight: Linear = dense_kind(source).of(
                dense_pieces, columns, depth, source.dtype, own, source.device
            )
        else:
            weight = _of_codes(source, run.pieces(), columns, depth, own)
        weight.origin, weight.shard = tuple(run.parts), shard
        found.append(weight)
        first += columns
    return found[0] if len(found) == 1 else Joined(found)


def dense_kind(source: Source) -> type[PackedDense] | type[TorchDense]:
    """Return the form of plain weights."""
    return PackedDense if source.compiled else TorchDense


def _of_codes(
    source: Source,
    pieces: Iterator[Codes],
    columns: int,
    depth: int,
    bias: torch.Tensor | None,
) -> Linear:
    """Pack codes for compiled code if it is enabled and supports their groups; else for torch,
    which takes numbers in place of codes with minima."""
    head = next(pieces)
    integer = isinstance(head, IntegerCodes)
    group = head.group if isinstance(head, IntegerCodes) else min(head.block[1], depth)
    pieces = chain([head], pieces)
    if not source.compiled or not packable(group, depth):
        if isinstance(head, IntegerCodes) and head.floored:
            plain = (piece.values().to(source.dtype) for piece in pieces)
            return dense_kind(source).of(plain, columns, depth, source.dtype, bias, source.device)
        return TorchQuantised.of(pieces, columns, depth, bias, source.device)
    if integer:
        integers = cast("Iterator[IntegerCodes]", pieces)
        return PackedIntegers.of(integers, columns, depth, bias, dynamic=source.dynamic)
    return PackedFloat8.of(cast("Iterator[Float8Codes]", pieces), columns, depth, bias)


def dense(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, compiled: bool = False
) -> Linear:
    """Make a projection from a plain `[N, K]` weight, float32, bfloat16 or float16.

    Args:
        weight: copied into the layout of the projection.
        bias: `[N]` or None.
        compiled: multiply with compiled CPU code.

    Raises:
        BuildError: compiled code is requested and unavailable.
    """
    kind = PackedDense if compiled else TorchDense
    return kind.of([weight], weight.shape[0], weight.shape[1], weight.dtype, bias, weight.device)
