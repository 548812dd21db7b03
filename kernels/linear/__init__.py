"""Projections: `x @ weight.T + bias` with a fused activation, product or sum on the output.

A `Linear` owns its weight's format, its layout in memory and its arithmetic. Neighbouring parts of
one format are one weight; weights of several formats stay side by side.

    dense.py           float32, bfloat16 and float16 weights, packed for compiled CPU code
    torch_dense.py     the same weights multiplied by torch: GPUs, and CPUs without a compiler
    fixed.py           plain weights and any number of rows, with a row's bits its own
    torch_quantised.py codes multiplied by Triton on GPUs and by torch on CPUs without a compiler
    packed_codes.py    codes of e4m3, and of 4, 6 or 8 bits, packed for compiled CPU code
    quantising.py      quantisation of plain weights
    low_rank.py        adapters' changes of products; low_rank_*.py: on a GPU
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter

import torch

from vlm_serve.kernels.linear.base import (
    Activation,
    ChangedRows,
    Epilogue,
    Linear,
    Part,
    Shard,
    WeightRecord,
    WeightSource,
    shape,
    stacked,
)
from vlm_serve.kernels.linear.codes import Codes, Float8Codes, IntegerCodes
from vlm_serve.kernels.linear.dense import PackedDense
from vlm_serve.kernels.linear.packed_codes import PackedCodes, packed_group
from vlm_serve.kernels.linear.torch_dense import TorchDense
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised

__all__ = ["Activation", "Linear", "Part", "Shard", "WeightSource", "WeightRecord", "dense", "load"]


@dataclass(slots=True)
class PartRun:
    """Neighbouring parts of one kind.

    Attributes:
        kind: common kind of their codes; None for dense parts.
        parts: in their order.
    """

    kind: Hashable | None
    parts: list[Part] = field(default_factory=list)
    _heads: list[Codes] = field(default_factory=list)
    _tails: list[Iterator[Codes]] = field(default_factory=list)

    @property
    def floored(self) -> bool:
        """Return True if its codes have minima."""
        return any(head.floored for head in self._heads)

    def add(self, part: Part, head: Codes | None, tail: Iterator[Codes]) -> None:
        """Add a part; `head` is the first piece of its codes, `tail` yields the others."""
        self.parts.append(part)
        if head is not None:
            self._heads.append(head)
            self._tails.append(tail)

    def pieces(self) -> Iterator[Codes]:
        """Yield the codes of all parts, once."""
        while self._heads:
            yield self._heads.pop(0)
            yield from self._tails.pop(0)


def runs(source: WeightSource, parts: Sequence[Part], shard: Shard | None) -> list[PartRun]:
    """Group parts into runs of neighbours of one kind."""
    groups: list[PartRun] = []
    for part in parts:
        tail = source.codes(part, shard)
        head = None if tail is None else next(tail)
        kind = None if head is None else _kind(head)
        if not groups or groups[-1].kind != kind:
            groups.append(PartRun(kind))
        groups[-1].add(part, head, iter(()) if tail is None else tail)
    return groups


def _kind(codes: Codes) -> Hashable:
    if isinstance(codes, IntegerCodes):
        outer = None if codes.outer is None else (codes.outer.size, codes.floored)
        values = codes.values_of_codes
        return IntegerCodes, codes.bits, values, codes.group, codes.scales.dtype, outer
    return Float8Codes, codes.block[1], codes.block[0] == 1, codes.scales.dtype


class Joined(Linear):
    """Projections of one input with weights in several formats, side by side as one projection.

    Each part keeps its own arithmetic. A row's bits depend on the row and the weights alone if this
    holds for every part.

    Args:
        parts: of one depth, in the order of their columns.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.columns = sum(part.columns for part in parts)
        self.depth, self.dtype = parts[0].depth, parts[0].dtype

    def _multiply(self, x: torch.Tensor, after: Epilogue, deterministic: bool) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.columns)
        first = 0
        for part in self.parts:
            columns = slice(first, first + part.columns)
            epilogue = after.of(itemgetter((slice(None), columns)))
            out[:, columns] = part._multiply(x, epilogue, deterministic)
            first = columns.stop
        return out

    def _changed(
        self, x: torch.Tensor, after: Epilogue, deterministic: bool, changes: ChangedRows | None
    ) -> torch.Tensor:
        if changes is None:
            return self._multiply(x, after, deterministic)
        parts, first = [], 0
        for part in self.parts:
            epilogue = after.of(itemgetter((slice(None), slice(first, first + part.columns))))
            parts.append(part._changed(x, epilogue, deterministic, changes))
            first += part.columns
        return torch.cat(parts, 1)

    def leaves(self) -> tuple[Linear, ...]:
        return self.parts

    def _gated(self, up: Linear, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        gate = self(x, activation="silu", deterministic=deterministic)
        return up(x, times=gate, deterministic=deterministic)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def load(
    source: WeightSource,
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
    joined, first = [], 0
    for run in runs(source, parts, shard):
        columns, depth = shape(run.parts, shard)
        run_bias = None if offsets is None else offsets[first : first + columns]
        if run.kind is None:
            dense_pieces = (piece for part in run.parts for piece in part.pieces(source, shard))
            weight: Linear = dense_kind(source).of(
                dense_pieces, columns, depth, source.dtype, run_bias, source.device
            )
        else:
            weight = _of_codes(source, run.pieces(), columns, depth, run_bias)
        weight.origin, weight.shard = tuple(run.parts), shard
        joined.append(weight)
        first += columns
    return joined[0] if len(joined) == 1 else Joined(joined)


def dense_kind(source: WeightSource) -> type[PackedDense] | type[TorchDense]:
    """Return the form of plain weights."""
    return PackedDense if source.compiled else TorchDense


def _of_codes(
    source: WeightSource,
    pieces: Iterator[Codes],
    columns: int,
    depth: int,
    bias: torch.Tensor | None,
) -> Linear:
    """Pack codes for compiled code if it is enabled and supports their groups; else for torch,
    which takes numbers in place of codes with minima."""
    head = next(pieces)
    pieces = chain([head], pieces)
    if source.compiled and packed_group(head.group, depth) is not None:
        return PackedCodes.of(pieces, columns, depth, bias, dynamic=source.dynamic)
    if head.floored:
        plain = (piece.values().to(source.dtype) for piece in pieces)
        return dense_kind(source).of(plain, columns, depth, source.dtype, bias, source.device)
    return TorchQuantised.of(pieces, columns, depth, bias, source.device)


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
