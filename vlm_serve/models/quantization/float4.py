"""FP4: rows of e2m1 codes, two per byte, low half first, with a one-byte scale per group of k.

NVFP4 has groups of 16 with e4m3 scales, and one float32 number for the whole weight:
compressed-tensors divides by it (`weight_packed`, `weight_scale`, `weight_global_scale`), ModelOpt
multiplies by it (`weight`, `weight_scale`, `weight_scale_2`). MXFP4 has groups of 32, whose scales
are exponents of two (`weight_packed`, `weight_scale`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part
from vlm_serve.models.quantization.base import (
    Format,
    Names,
    Tensors,
    exponents,
    group_of,
    integers,
    shaped,
    whole_weight,
)
from vlm_serve.models.quantization.integers import OpenedIntegers, codes_of_rows

_E8M0 = torch.float8_e8m0fnu
_HALF = 0.5
"""The unit of codes: twice a number is whole."""


@dataclass(frozen=True, slots=True)
class Float4(Format):
    """One kind. `group`: values per scale; `modelopt`: in the layout of ModelOpt, else in that of
    compressed-tensors."""

    kind: Literal["NVFP4", "MXFP4"]
    group: int
    modelopt: bool = False

    @property
    def label(self) -> str:
        return self.kind

    def mark(self, names: Names) -> str:
        return names.weight if self.modelopt else names.of_weight("packed")

    def holds(self, tensors: Tensors, names: Names) -> bool:
        mark = self.mark(names)
        return mark in tensors and (not self.modelopt or tensors.stored(mark).dtype == torch.uint8)

    def open(self, tensors: Tensors, part: Part) -> OpenedIntegers:
        names, (rows, depth) = whole_weight(part), part.sizes
        mark = self.mark(names)
        group = group_of(self.group, part, mark)
        packed = integers(tensors, mark, (rows, depth // 2), torch.uint8)
        shape, factor = (rows, depth // group), 1.0
        if self.kind == "MXFP4":
            scales = exponents(tensors, names.of_weight("scale"), shape).view(_E8M0)
        else:
            scales = _numbers(tensors, names.of_weight("scale"), shape)
            factor = self._factor(tensors, names)
        unpacked = partial(codes_of_rows, packed, 4)
        return OpenedIntegers(unpacked, scales, None, 4, group, factor * _HALF)

    def nbytes(self, columns: int, depth: int) -> int:
        """Return the bytes in memory, with a factor per row, so that rows of several tensors can be
        stacked."""
        return columns * (depth // 2 + -(-depth // self.group) + 4)

    def _factor(self, tensors: Tensors, names: Names) -> float:
        """Return the factor of all scales of NVFP4."""
        name = names.of_weight("scale_2" if self.modelopt else "global_scale")
        factor = float(shaped(tensors, name, (1,), ()))
        if not math.isfinite(factor) or factor < 0 or not (factor or self.modelopt):
            raise CheckpointError(f"{name} is {factor}, expected a positive number")
        return factor if self.modelopt else 1 / factor


NVFP4, MXFP4 = Float4("NVFP4", 16), Float4("MXFP4", 32)
MODELOPT_NVFP4 = Float4("NVFP4", 16, modelopt=True)


def _numbers(tensors: Tensors, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return scales that are e4m3 numbers."""
    numbers = integers(tensors, name, shape, torch.float8_e4m3fn)
    codes = numbers.view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise CheckpointError(f"{name} holds scales that are NaN or infinite")
    if bool((codes > 0x80).any()):
        raise CheckpointError(f"{name} holds negative scales")
    return numbers
