"""GGUF: blocks of codes with one or two levels of scales, row after row.

A weight's blocks are one tensor of bytes. Where the file has its columns in another order, a second
one holds that order. It moves whole groups of values with one scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part
from vlm_serve.kernels.linear.codes import IQ4_VALUES, IntegerCodes
from vlm_serve.kernels.linear.packed_codes import MAX_GROUP
from vlm_serve.models.config import mismatch
from vlm_serve.models.gguf.blocks import decode
from vlm_serve.models.gguf.decoded import finite
from vlm_serve.models.gguf.reader import BY_NAME, BlockType
from vlm_serve.models.gguf.tensors import blocks_of, columns_of, factor_of
from vlm_serve.models.quantization.base import (
    PIECE_BYTES,
    Format,
    Names,
    Opened,
    Tensors,
    whole_weight,
)
from vlm_serve.models.quantization.fields import Rule, plain_name


@cache
def _one_block(kind: BlockType) -> IntegerCodes:
    """Return the codes of a block, which have the form of all of its type."""
    return decode(kind, torch.zeros(1, kind.nbytes, dtype=torch.uint8))


@dataclass(frozen=True, slots=True)
class Blocks(Format):
    """Weights of one type of blocks. `flat`: with one level of scales, float32 where the file has
    two, and codes of eight bits in place of a table's."""

    type: BlockType
    flat: bool = False

    @property
    def label(self) -> str:
        return self.type.name

    def mark(self, names: Names) -> str:
        return blocks_of(names.weight, self.type)

    def open(self, tensors: Tensors, part: Part) -> OpenedBlocks:
        names, (rows, depth) = whole_weight(part), part.sizes
        actual = tensors.shape_of(names.weight)
        assert actual is not None, "blocks have a weight"
        if actual != (rows, depth):
            raise CheckpointError(mismatch(names.weight, actual, (rows, depth)))
        order = columns_of(names.weight)
        columns = tensors.stored(order) if order in tensors else None
        name = factor_of(names.weight)
        factor = float(tensors.stored(name)) if name in tensors else 1.0
        if not math.isfinite(factor) or (factor != 1 and not _one_block(self.type).float4):
            raise CheckpointError(
                f"{names.weight} of type {self.type.name} has a factor of {factor}"
            )
        blocks = tensors.stored(self.mark(names))
        return OpenedBlocks(self.type, blocks, columns, names.weight, factor)

    def nbytes(self, columns: int, depth: int) -> int:
        codes = _one_block(self.type)
        if self.flat:
            codes = codes.wide().flat()
        group, blocks = min(codes.group, MAX_GROUP), -(-depth // self.type.values)
        per_group = codes.scales.itemsize + (codes.zeros is not None)
        per_block = 0 if codes.outer is None else 2 + 2 * codes.floored
        per_row = 4 * (codes.factors is not None)
        scales = depth // group * per_group + blocks * per_block + per_row
        return columns * (depth * codes.bits // 8 + scales)

    def without_compiler(self) -> Blocks | None:
        codes = _one_block(self.type)
        if codes.table not in (None, IQ4_VALUES):
            return self
        return None if codes.floored else Blocks(self.type, flat=True)

    def in_one_piece(self) -> Blocks | None:
        return None if _one_block(self.type).floored else Blocks(self.type, flat=True)


@dataclass(frozen=True, slots=True)
class OpenedBlocks(Opened):
    """The blocks of a weight.

    Attributes:
        kind: their type.
        blocks: uint8 `[N, bytes of a row]`.
        order: int64 `[K]`, the place of every column; None: all are in their place.
        weight: its name, for messages.
        factor: of all values.
    """

    kind: BlockType
    blocks: torch.Tensor
    order: torch.Tensor | None
    weight: str
    factor: float

    @property
    def piece_bytes(self) -> int:
        # Blocks are taken apart in more steps than other codes, and tables of embeddings expanded.
        return PIECE_BYTES // 4

    def piece(self, rows: range, columns: range, unit: int) -> IntegerCodes:
        blocks = self.blocks[rows.start : rows.stop]
        if self.order is None:
            codes = self._codes(blocks, columns)
        else:
            codes = self._codes(
                blocks, range(blocks.shape[1] // self.kind.nbytes * self.kind.values)
            )
            codes = codes.of_columns(self.order).of_columns(columns)
        return codes

    def _codes(self, rows: torch.Tensor, columns: range) -> IntegerCodes:
        """Return the codes of some columns, from the blocks around them."""
        values, nbytes = self.kind.values, self.kind.nbytes
        first, last = columns.start // values, -(-columns.stop // values)
        decoded = decode(self.kind, rows[:, first * nbytes : last * nbytes])
        if not finite(decoded):
            raise CheckpointError(f"{self.weight} holds scales that are NaN or infinite")
        if decoded.factors is not None:
            decoded.factors.mul_(self.factor)
        start = columns.start - first * values
        return decoded.of_columns(range(start, start + len(columns)))


def type_rules(weights_by_type: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Return the rules for weights by the names of their types.

    Args:
        found: `types` of quantization_config.

    Raises:
        CheckpointError: it is not as `gguf/folder.py` writes it.
    """
    rules = []
    for name, weights in weights_by_type.items():
        if name not in BY_NAME or not isinstance(weights, list):
            raise CheckpointError(f"types in quantization_config has the unknown type {name!r}")
        modules = frozenset(plain_name(Names(str(weight)).module) for weight in weights)
        rules.append(Rule(Blocks(BY_NAME[name]), modules, anchored=True))
    return tuple(rules)
