"""Quantised weights in memory for torch and Triton: codes as they are, not expanded.

4-bit codes lie two to a byte, by halves of a group: byte j of a group of g holds code j in its low
bits and code g / 2 + j in its high ones, so codes of each half stay neighbours. The low four bits
of 6-bit codes lie the same way. Behind those of a group follow its high two bits, in quarters.

Places in a table lie alike: 2 bits in quarters, 3 bits as 2 with the top ones behind them. They
keep both levels of scales. Kernels of Triton know no tables: torch multiplies by such weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear.codes import (
    FLOAT4_VALUES,
    IQ4_VALUES,
    Codes,
    Float8Codes,
    scale_values,
)

_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 6: (4, 2), 8: (8,)}
"""Bits of a code that lie together, by bits of the code; the lowest first. Groups of each fill
whole bytes."""


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
        outer: float16 `[N, K / size]`, the second level of int8 scales beside a table.
        table: float32 `[16]`, the values of codes that are places; None: they are numbers.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int
    group: int
    zeros: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    float4: bool = False
    outer: torch.Tensor | None = None
    table: torch.Tensor | None = None

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
        codes = self._unpacked(codes)
        wide = codes.float()
        if self.float4:
            wide = wide.new_tensor(FLOAT4_VALUES)[codes.long()]
        elif self.table is not None:
            wide = self.table[codes.int()]
        elif self.zeros is None:
            wide -= 2 ** (self.bits - 1)
        else:
            wide -= self.zeros[rows].float().unsqueeze(-1)
        factors = None if self.factors is None else self.factors[rows]
        if self.outer is not None:
            outer = self.outer[rows].float()
            scales = scales.float() * outer.repeat_interleave(scales.shape[1] // outer.shape[1], 1)
        wide *= scale_values(scales, factors).unsqueeze(-1)
        return wide.flatten(1)

    def _unpacked(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the codes of groups, uint8 `[..., group]`, from their bytes."""
        found, first = None, 0
        for bits in _PLANES[self.bits]:
            size = self.group * bits // 8
            plane = codes[..., first : first + size]
            shifted = [plane >> at for at in range(0, 8, bits)]
            own = torch.cat(shifted, -1) & ((1 << bits) - 1) if bits < 8 else plane
            found = own if found is None else found | own << self.bits - bits
            first += size
        assert found is not None, "codes have bits"
        return found

    @property
    def depth(self) -> int:
        """K."""
        return self.codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        tensors = (self.codes, self.scales, self.zeros, self.factors, self.outer)
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
        for name in ("codes", "scales", "zeros", "factors", "outer"):
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
    others = tensors.get("zeros"), tensors.get("factors"), like.float4, tensors.get("outer")
    table = None if like.table is None else like.table.to(device)
    return Stored(codes, scales, like.bits, like.group, *others, table)


def _kind(piece: Stored) -> tuple[object, ...]:
    table = None if piece.table is None else tuple(piece.table.tolist())
    return piece.bits, piece.group, piece.float4, table, piece.codes.dtype, piece.scales.dtype


def _laid_out(piece: Codes) -> Stored:
    """Return a piece as it is stored.

    Raises:
        KernelArgumentError: an unsupported width or group.
    """
    rows, depth = piece.codes.shape
    if isinstance(piece, Float8Codes):
        scales = piece.scales.repeat_interleave(piece.block[0], 0)[:rows]
        return Stored(piece.codes, scales, 8, piece.group)
    if piece.table is None:
        piece = piece.flat()
    elif piece.table == IQ4_VALUES:
        piece = piece.wide()
    bits, group = piece.bits, piece.group
    known = (2, 3, 4, 8) if piece.table is not None else (4, 6, 8)
    if bits not in known:
        raise KernelArgumentError("bits", f"{known} are known, got {bits}")
    if group < 1 or depth % group:
        raise KernelArgumentError("group", f"{group} does not divide {depth}")
    if group * _PLANES[bits][-1] % 8:
        raise KernelArgumentError("group", f"{group} codes of {bits} bits fill no whole bytes")
    codes = piece.codes if bits == 8 else packed_rows(piece.codes, bits, group)
    table = None
    if piece.table is not None:
        table = torch.tensor(piece.table + (0,) * (16 - len(piece.table)), dtype=torch.float32)
    outer = None if piece.outer is None else piece.outer.scales
    flags = piece.float4, outer, table
    return Stored(codes, piece.scales, bits, group, piece.zeros, piece.factors, *flags)


def packed_rows(codes: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Pack uint8 `[n, K]` codes of less than 8 bits into `[n, K * bits / 8]` bytes."""
    planes, lower = [], 0
    for own in _PLANES[bits]:
        parts = codes.view(len(codes), -1, 8 // own, group * own // 8)
        first, *others = ((parts >> lower) & ((1 << own) - 1)).unbind(2)
        for place, part in enumerate(others, 1):
            first = first | part << place * own
        planes.append(first)
        lower += own
    return torch.cat(planes, -1).flatten(1)
