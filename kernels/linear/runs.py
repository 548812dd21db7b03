"""Grouping of neighbouring parts in the same format, so that they can be one weight."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from vlm_serve.kernels.linear.base import Part, Shard, Source
from vlm_serve.kernels.linear.codes import Codes, Float8Codes, IntegerCodes


@dataclass(slots=True)
class Run:
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
        return any(isinstance(each, IntegerCodes) and each.floored for each in self._heads)

    def add(self, part: Part, head: Codes | None, tail: Iterator[Codes]) -> None:
        """Add a part; `head` is the first piece of its codes, `tail` yields the others."""
        self.parts.append(part)
        if head is not None:
            self._heads.append(head)
            self._tails.append(tail)

    def pieces(self) -> Iterator[Codes]:
        """Yield the codes of all parts, once.

        They have zero points if any part has some, and blocks of as many rows as all parts allow.
        """
        heads = self._heads
        zeros = any(isinstance(each, IntegerCodes) and each.zeros is not None for each in heads)
        high = math.gcd(*(each.block[0] for each in heads if isinstance(each, Float8Codes)))
        while self._heads:
            for piece in chain([self._heads.pop(0)], self._tails.pop(0)):
                if isinstance(piece, IntegerCodes):
                    yield _with_zeros(piece) if zeros else piece
                else:
                    yield _in_rows(piece, high)


def runs(source: Source, parts: Sequence[Part], shard: Shard | None) -> list[Run]:
    """Group parts into runs of neighbours of one kind."""
    found: list[Run] = []
    for part in parts:
        tail = source.codes(part, shard)
        head = None if tail is None else next(tail)
        kind = None if head is None else _kind(head)
        if not found or found[-1].kind != kind:
            found.append(Run(kind))
        found[-1].add(part, head, iter(()) if tail is None else tail)
    return found


def _kind(codes: Codes) -> Hashable:
    if isinstance(codes, IntegerCodes):
        outer = None if codes.outer is None else (codes.outer.size, codes.floored)
        return IntegerCodes, codes.bits, codes.float4, codes.group, codes.scales.dtype, outer
    return Float8Codes, codes.block[1], codes.block[0] == 1, codes.scales.dtype


def _with_zeros(piece: IntegerCodes) -> IntegerCodes:
    if piece.zeros is not None:
        return piece
    middle = torch.full(piece.scales.shape, 1 << (piece.bits - 1), dtype=torch.uint8)
    return replace(piece, zeros=middle)


def _in_rows(piece: Float8Codes, high: int) -> Float8Codes:
    """Cut blocks to `high` rows, or to the largest common divisor with their own height."""
    high = math.gcd(high, piece.block[0])
    if high == piece.block[0]:
        return piece
    rows = piece.codes.shape[0]
    scales = piece.scales.repeat_interleave(piece.block[0] // high, 0)[: -(-rows // high)]
    return replace(piece, scales=scales, block=(high, piece.block[1]))
