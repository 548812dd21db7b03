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
    scale_values,
)

_SHARES = {4: 2, 6: 4, 8: 1}
"""Codes per byte, by bits; groups fill whole bytes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantised weight.

    Attributes:
        codes: uint8 `[N, K * bits / 8]`, or float8_e4m3fn `[N, K]`.
        scales: `[N, ceil(K / group)]`, in their original dtype. Those of blocks of several rows are
            repeated, since rows of several tensors may be stacked.
        bits: of a code.
        group: values per scale; the last ones of float8 may be fewer.
        zeros: uint8 `[N, K / group]`; `2**(bits - 1)` everywhere if None.
        factors, float4: as in IntegerCodes.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int
    group: int
    zeros: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    float4: bool = False

    @property
    def float8(self) -> bool:
        """True if codes are float8 numbers."""
        return self.codes.dtype == torch.float8_e4m3fn

    def plain(self, rows: slice) -> torch.Tensor:
        """Dequantise these rows to float32 `[n, K]`."""
        codes, scales = self.codes[rows], self.scales[rows]
        if self.float8:
            wide_scales = scales.float().repeat_interleave(self.group, 1)
            return codes.float().mul_(wide_scales[:, : self.depth])
        codes = codes.view(-1, *self.scales.shape[1:], self.group * self.bits // 8)
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
        wide *= scale_values(scales, factors).unsqueeze(-1)
        return wide.flatten(1)

    @property
    def depth(self) -> int:
        """K."""
        return self.codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        tensors = (self.codes, self.scales, self.zeros, self.factors)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def stored(pieces: Iterable[Codes], columns: int, depth: int, device: torch.device) -> Stored:
    """Store `[n, K]` pieces stacked by rows.

    Raises:
        KernelArgumentError: there are none, or they are of several kinds or an unsupported one.
    """
    tensors: dict[str, torch.Tensor] = {}
    like: Stored | None = None
    first = 0
    for piece in map(_laid_out, pieces):
        like = like or piece
        if _kind(piece) != _kind(like) or piece.depth != depth:
            raise KernelArgumentError("pieces", "all of one weight must be of one kind")
        rows = slice(first, first + len(piece.codes))
        for name in ("codes", "scales", "zeros", "factors"):
            values: torch.Tensor | None = getattr(piece, name)
            if values is None:
                continue
            if name not in tensors:
                shape = (columns, *values.shape[1:])
                tensors[name] = torch.empty(shape, dtype=values.dtype, device=device)
                if name == "zeros":  # Pieces without have them in the middle.
                    tensors[name].fill_(1 << (piece.bits - 1))
            tensors[name][rows] = values
        first = rows.stop
    if like is None or first != columns:
        raise KernelArgumentError("pieces", f"{first} rows, expected {columns}")
    codes, scales = tensors["codes"], tensors["scales"]
    others = tensors.get("zeros"), tensors.get("factors")
    return Stored(codes, scales, like.bits, like.group, *others, float4=like.float4)


def _kind(piece: Stored) -> tuple[object, ...]:
    return piece.bits, piece.group, piece.float4, piece.codes.dtype, piece.scales.dtype


def _laid_out(piece: Codes) -> Stored:
    """Return a piece as it is stored.

    Raises:
        KernelArgumentError: an unsupported width or group.
    """
    rows, depth = piece.codes.shape
    if isinstance(piece, Float8Codes):
        scales = piece.scales.repeat_interleave(piece.block[0], 0)[:rows]
        return Stored(piece.codes, scales, 8, piece.group)
    bits, group = piece.bits, piece.group
    if bits not in _SHARES:
        raise KernelArgumentError("bits", f"4, 6 or 8 are known, got {bits}")
    if group < 1 or depth % group:
        raise KernelArgumentError("group", f"{group} does not divide {depth}")
    if group % _SHARES[bits]:
        raise KernelArgumentError("group", f"{group} codes of {bits} bits fill no whole bytes")
    piece = piece.flat()
    codes = _PACKED[bits](piece.codes, group)
    return Stored(codes, piece.scales, bits, group, piece.zeros, piece.factors, piece.float4)


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
