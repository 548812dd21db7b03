"""FP8 weights: `X.weight` in float8_e4m3fn, and scales per block, per row or for the whole tensor.

Published files call the scales `weight_scale_inv` (blocks) or `weight_scale`, and multiply by both.
Experts in one tensor `Y` have `Y_scale_inv` or `Y_scale`. Scales of MXFP8 are exponents of two in
one byte, per row and 32 columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part
from vlm_serve.kernels.linear.codes import Float8Codes
from vlm_serve.models.quantization.base import (
    Format,
    Names,
    Opened,
    Tensors,
    exponents,
    integers,
    scales,
)

_CODES = torch.float8_e4m3fn
_NAN = 0x7F
MXFP8_BLOCK = (1, 32)
_SUFFIXES = ("scale_inv", "scale")


@dataclass(frozen=True, slots=True)
class Float8(Format):
    """The format. `block`: rows and columns per scale; None for one scale per row or one in all.
    `exponents`: whether scales are exponents of two."""

    block: tuple[int, int] | None
    exponents: bool = False

    @property
    def label(self) -> str:
        if self.exponents:
            return "MXFP8"
        if self.block is None:
            return "FP8 with a scale per channel"
        return f"FP8 in blocks of {self.block[0]}x{self.block[1]}"

    def mark(self, names: Names) -> str:
        return names.weight

    def holds(self, tensors: Tensors, names: Names) -> bool:
        return any(names.of_weight(suffix) in tensors for suffix in _SUFFIXES) or (
            names.weight in tensors and tensors.stored(names.weight).dtype == _CODES
        )

    def open(self, tensors: Tensors, part: Part) -> OpenedFloat8:
        names = Names(part.name)
        codes = integers(tensors, part.name, part.shape, _CODES)
        name = _scale_name(tensors, names, _SUFFIXES[0] if self.block else _SUFFIXES[1])
        outer = tuple(codes.shape[: 0 if part.index is None else 1])
        if codes.ndim != len(outer) + 2:
            raise CheckpointError(f"{part.name} is FP8 and no matrix, which is not supported")
        height, width = codes.shape[-2:]
        block = self.block
        if block is None:
            # In a transposed tensor, a row of the weight is a column.
            channels = (1, width) if part.transposed else (height, 1)
            shapes = [(*outer, *channels), (*outer, 1, 1), outer, (*outer, 1), (*outer, height)]
            factors = scales(tensors, name, *shapes)
            single = factors.numel() == math.prod(outer)
            factors = factors.reshape(*outer, *((1, 1) if single else channels))
            factors = factors.expand(*outer, *channels)
            block = (height, 1) if part.transposed else (1, width)
        else:
            high, wide = -(-height // block[0]), -(-width // block[1])
            shape = (*outer, high, wide)
            if self.exponents:
                # bfloat16 has all powers of two.
                factors = torch.exp2(exponents(tensors, name, shape).float() - 127).bfloat16()
            else:
                # ModelOpt's blocks keep the dimensions that they were reduced over.
                factors = scales(tensors, name, shape, (*outer, high, 1, wide, 1)).reshape(shape)
        if part.index is not None:
            codes, factors = codes[part.index], factors[part.index]
        if part.transposed:
            codes, factors, block = codes.T, factors.T, (block[1], block[0])
        return OpenedFloat8(part.name, codes, factors, block)

    def nbytes(self, columns: int, depth: int) -> int:
        """Return the bytes in memory. Scales are stored per row, so that rows of several tensors
        can be stacked."""
        groups = 1 if self.block is None else -(-depth // self.block[1])
        return columns * (depth + 2 * groups)


def _scale_name(tensors: Tensors, names: Names, usual: str) -> str:
    """Return the name of a weight's scales. Raises CheckpointError if there are none."""
    scales = [names.of_weight(suffix) for suffix in _SUFFIXES if names.of_weight(suffix) in tensors]
    if not scales:
        raise CheckpointError(f"the checkpoint has no {names.of_weight(usual)}")
    return scales[0]


def widened(tensors: Tensors, name: str) -> torch.Tensor:
    """Return an FP8 tensor of any shape, with one scale or one per row, in float32.

    Raises:
        CheckpointError: its scale is missing or does not fit, or it holds NaN.
    """
    codes, names = tensors.stored(name), Names(name)
    scale = _scale_name(tensors, names, _SUFFIXES[1])
    rows, rest = codes.shape[0], (1,) * (codes.ndim - 1)
    shapes = [(), (1,), (rows,), (rows, 1), (rows, *rest)]
    factors = scales(tensors, scale, *shapes).float()
    if bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
        raise CheckpointError(f"{name} holds values that are NaN")
    return codes.float() * factors.reshape(-1, *rest)


class OpenedFloat8(Opened):
    """`[N, K]` codes with a grid of scales."""

    def __init__(
        self, name: str, codes: torch.Tensor, factors: torch.Tensor, block: tuple[int, int]
    ) -> None:
        self._name, self._codes, self._factors, self._block = name, codes, factors, block

    @property
    def unit(self) -> int:
        return self._block[0]

    def piece(self, rows: range, columns: range, unit: int) -> Float8Codes:
        whole = len(columns) == self._codes.shape[1]
        wide = self._block[1] if whole else math.gcd(self._block[1], columns.start)
        down = torch.arange(rows.start, rows.stop, unit) // self._block[0]
        across = torch.arange(columns.start, columns.stop, wide) // self._block[1]
        codes = self._codes[rows.start : rows.stop, columns.start : columns.stop].contiguous()
        if bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
            raise CheckpointError(f"{self._name} holds values that are NaN")
        return Float8Codes(codes, self._factors[down][:, across], (unit, min(wide, len(columns))))
