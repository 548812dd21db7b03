"""Projections: `x @ weight.T + bias` with what follows on the way out. A `Linear` owns its weight's
format, its layout in memory and its arithmetic.

    dense.py      float32, bfloat16 and float16 weights in our own packed layout, compiled CPU code
    torch_dense.py the same weights multiplied by torch: GPUs, and CPUs without a compiler
    torch_quantised.py codes of 4 or 8 bits multiplied by torch
"""

from __future__ import annotations

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
from vlm_serve.kernels.linear.dense import PackedDense
from vlm_serve.kernels.linear.torch_dense import TorchDense

__all__ = ["Activation", "Linear", "Part", "Shard", "Source", "WeightRecord", "dense", "load"]


def load(
    source: Source,
    parts: list[Part],
    bias: list[Part] | None = None,
    shard: Shard | None = None,
) -> Linear:
    """Several tensors of one input below each other, as one projection.

    Args:
        source: where they come from, and for which device and kernels.
        parts: the rows, in their order; all of one depth.
        bias: as many of them, from one-dimensional tensors.
        shard: the part of every row or of all rows that this rank holds.

    Raises:
        CheckpointError: as from the source.
    """
    kind = PackedDense if source.compiled else TorchDense
    columns, depth = shape(parts, shard)
    pieces = (piece for part in parts for piece in part.pieces(source, shard))
    offsets = stacked(source, bias or [], shard)
    return kind.of(pieces, columns, depth, source.dtype, offsets, source.device)


def dense(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, compiled: bool = False
) -> Linear:
    """A projection by a plain `[N, K]` weight, float32, bfloat16 or float16.

    Args:
        weight: copied into the layout of the projection.
        bias: `[N]` or None.
        compiled: whether compiled CPU code is to multiply.

    Raises:
        BuildError: compiled code is wanted and cannot be had.
    """
    kind = PackedDense if compiled else TorchDense
    return kind.of([weight], weight.shape[0], weight.shape[1], weight.dtype, bias, weight.device)
