"""Quantised weights in memory for torch and Triton: codes as they are, not expanded.

4-bit codes lie two to a byte, by halves of a group: byte j of a group of g holds code j in its low
bits and code g / 2 + j in its high ones, so codes of each half stay neighbours. The low four bits
of 6-bit codes lie the same way. Behind those of a group follow its high two bits, in quarters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.codes import (
    FLOAT4_VALUES,
    Codes,
    Float8Codes,
    IntegerCodes,
    scale_values,
)

_SHARES = {4: 2, 6: 4, 8: 1}
"""Codes per byte, by bits; groups fill whole bytes."""


@dataclass(frozen=True, slots=True)
class StoredIntegers:
    """Codes of 4, 6 or 8 bits.

    Attributes:
        codes: uint8 `[N, K * bits / 8]`.
        scales: `[N, K / group]`, in their original dtype.
        zeros: uint8 `[N, K / group]`; `2**(bits - 1)` everywhere if None.
        bits, group, factors, float4: as in IntegerCodes.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    factors: torch.Tensor | None = None
    float4: bool = False

    @classmethod
    def empty(
        cls, like: IntegerCodes, columns: int, depth: int, device: torch.device
    ) -> StoredIntegers:
        """Allocate space for `[N, K]` codes like these.

        Raises:
            KernelArgumentError: an unsupported width or group.
        """
        like = like.flat()
        if like.bits not in _SHARES:
            raise KernelArgumentError("bits", f"4, 6 or 8 are known, got {like.bits}")
        if like.group < 1 or depth % like.group:
            raise KernelArgumentError("group", f"{like.group} does not divide {depth}")
        if like.group % _SHARES[like.bits]:
            problem = f"{like.group} codes of {like.bits} bits fill no whole bytes"
            raise KernelArgumentError("group", problem)
        groups = (columns, depth // like.group)
        return cls(
            torch.empty(columns, depth * like.bits // 8, dtype=torch.uint8, device=device),
            torch.empty(groups, dtype=like.scales.dtype, device=device),
            None if like.zeros is None else torch.empty(groups, dtype=torch.uint8, device=device),
            like.bits,
            like.group,
            None if like.factors is None else torch.empty(columns, device=device),
            like.float4,
        )

    def put(self, first: int, piece: Codes) -> None:
        """Fill rows from `first` on.

        Raises:
            KernelArgumentError: codes of another kind.
        """
        if isinstance(piece, IntegerCodes):
            piece = piece.flat()
        same = isinstance(piece, IntegerCodes) and (
            (piece.bits, piece.float4) == (self.bits, self.float4)
            and piece.group == self.group
            and (piece.zeros is None) == (self.zeros is None)
            and piece.scales.dtype == self.scales.dtype
        )
        if not same:
            raise KernelArgumentError("pieces", "all of one weight must be of one kind")
        assert isinstance(piece, IntegerCodes)
        rows = slice(first, first + piece.codes.shape[0])
        self.codes[rows] = _PACKED[self.bits](piece.codes, self.group)
        self.scales[rows] = piece.scales
        if self.zeros is not None and piece.zeros is not None:
            self.zeros[rows] = piece.zeros
        if self.factors is not None and piece.factors is not None:
            self.factors[rows] = piece.factors

    def plain(self, rows: slice) -> torch.Tensor:
        """Dequantise these rows to float32 `[n, K]`."""
        codes = self.codes[rows].view(-1, *self.scales.shape[1:], self.group * self.bits // 8)
        if self.bits < 8:
            low, high = codes[..., : self.group // 2], codes[..., self.group // 2 :]
            codes = torch.cat([low & 15, low >> 4], -1)
            if self.bits == 6:
                tops = torch.cat([high & 3, high >> 2 & 3, high >> 4 & 3, high >> 6], -1)
                codes = codes | tops << 4
        wide = codes.float()
        if self.float4:
            wide = wide.new_tensor(FLOAT4_VALUES)[codes.long()]
        elif self.zeros is None:
            wide -= 2 ** (self.bits - 1)
        else:
            wide -= self.zeros[rows].float().unsqueeze(-1)
        factors = None if self.factors is None else self.factors[rows]
        wide *= scale_values(self.scales[rows], factors).unsqueeze(-1)
        return wide.flatten(1)

    @property
    def depth(self) -> int:
        """K."""
        return self.codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        others = (self.zeros, self.factors)
        more = sum(tensor.nbytes for tensor in others if tensor is not None)
        return self.codes.nbytes + self.scales.nbytes + more


@dataclass(frozen=True, slots=True)
class StoredFloat8:
    """Codes that are float8 numbers, with a scale per row and block of k.

    Scales of blocks of several rows are repeated, since rows of several tensors may be stacked.

    Attributes:
        codes: float8_e4m3fn `[N, K]`.
        scales: `[N, ceil(K / block)]`, in their original dtype.
        block: values per scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: int

    @classmethod
    def empty(
        cls, like: Float8Codes, columns: int, depth: int, device: torch.device
    ) -> StoredFloat8:
        """Allocate space for `[N, K]` codes like these."""
        block = min(like.block[1], depth)
        return cls(
            torch.empty(columns, depth, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(columns, -(-depth // block), dtype=like.scales.dtype, device=device),
            block,
        )

    def put(self, first: int, piece: Codes) -> None:
        """Fill rows from `first` on.

        Raises:
            KernelArgumentError: codes of another kind.
        """
        same = isinstance(piece, Float8Codes) and (
            min(piece.block[1], self.codes.shape[1]) == self.block
            and piece.scales.dtype == self.scales.dtype
        )
        if not same:
            raise KernelArgumentError("pieces", "all of one weight must be of one kind")
        assert isinstance(piece, Float8Codes)
        count = piece.codes.shape[0]
        rows = slice(first, first + count)
        self.codes[rows] = piece.codes
        self.scales[rows] = piece.scales.repeat_interleave(piece.block[0], 0)[:count]

    def plain(self, rows: slice) -> torch.Tensor:
        """Dequantise these rows to float32 `[n, K]`."""
        codes, scales = self.codes[rows].float(), self.scales[rows].float()
        return codes.mul_(scales.repeat_interleave(self.block, 1)[:, : codes.shape[1]])

    @property
    def depth(self) -> int:
        """K."""
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.codes.nbytes + self.scales.nbytes


Stored = StoredIntegers | StoredFloat8


def stored(pieces: Iterable[Codes], columns: int, depth: int, device: torch.device) -> Stored:
    """Store `[n, K]` pieces stacked by rows.

    Raises:
        KernelArgumentError: there are none, or they are of several kinds or an unsupported one.
    """
    kept: Stored | None = None
    first = 0
    for piece in pieces:
        if kept is None:
            if isinstance(piece, IntegerCodes):
                kept = StoredIntegers.empty(piece, columns, depth, device)
            else:
                kept = StoredFloat8.empty(piece, columns, depth, device)
        kept.put(first, piece)
        first += piece.codes.shape[0]
    if kept is None or first != columns:
        raise KernelArgumentError("pieces", f"{first} rows, expected {columns}")
    return kept


def paired(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Pack uint8 `[n, K]` codes of 4 bits into `[n, K / 2]` bytes."""
    low, high = codes.reshape(codes.shape[0], -1, 2, group // 2).unbind(2)
    return (low | (high << 4)).flatten(1)


def _split(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Pack uint8 `[n, K]` codes of 6 bits into `[n, K * 3 / 4]` bytes."""
    rows = codes.shape[0]
    low = paired(codes & 15, group).view(rows, -1, group // 2)
    a, b, c, d = (codes >> 4).reshape(rows, -1, 4, group // 4).unbind(2)
    return torch.cat([low, a | b << 2 | c << 4 | d << 6], -1).flatten(1)


_PACKED: dict[int, Callable[[torch.Tensor, int], torch.Tensor]] = {
    4: paired,
    6: _split,
    8: lambda codes, _group: codes,
}
