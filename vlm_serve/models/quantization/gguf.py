"""GGUF: blocks of codes with one or two levels of scales, row after row.

A weight's blocks are one tensor of bytes. Where the file has its columns in another order, a second
one holds that order. It moves whole groups of values with one scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part
from vlm_serve.kernels.linear.codes import IntegerCodes
from vlm_serve.models.config import mismatch
from vlm_serve.models.gguf.blocks import decode
from vlm_serve.models.gguf.decoded import finite
from vlm_serve.models.gguf.reader import BY_NAME, BlockType
from vlm_serve.models.gguf.tensors import blocks_of, columns_of
from vlm_serve.models.quantization.base import (
    PIECE_BYTES,
    Format,
    Names,
    Opened,
    Tensors,
    whole_weight,
)
from vlm_serve.models.quantization.fields import Rule, plain_name


class _Memory(NamedTuple):
    """Of a type in memory: bits of a code, values in a group, and bytes of a group's scale and
    minimum, of the numbers above them in a block, and of a row's factor."""

    bits: int
    group: int
    per_group: int
    per_block: int = 0
    per_row: int = 0

    @property
    def floored(self) -> bool:
        """Return True if groups have minima."""
        return self.per_block == 4


_MEMORY = {
    "Q8_0": _Memory(8, 32, 2),
    "Q5_0": _Memory(6, 32, 2),
    "Q4_0": _Memory(4, 32, 2),
    "IQ4_NL": _Memory(4, 32, 2),
    "MXFP4": _Memory(4, 32, 1, per_row=4),
    "NVFP4": _Memory(4, 16, 1, per_row=4),
    "TQ1_0": _Memory(2, 128, 2),
    "TQ2_0": _Memory(2, 128, 2),
    "IQ1_S": _Memory(2, 32, 1, 2, 4),
    "IQ1_M": _Memory(3, 16, 1, 2, 4),
    "IQ2_XXS": _Memory(3, 32, 1, 2, 4),
    "IQ2_XS": _Memory(3, 16, 1, 2, 4),
    "IQ2_S": _Memory(3, 16, 1, 2, 4),
    "IQ3_XXS": _Memory(4, 32, 1, 2, 4),
    "IQ3_S": _Memory(4, 32, 1, 2),
    "Q5_1": _Memory(6, 32, 2, 4),
    "Q4_1": _Memory(4, 32, 2, 4),
    "Q6_K": _Memory(6, 16, 1, 2),
    "Q5_K": _Memory(6, 32, 2, 4),
    "Q4_K": _Memory(4, 32, 2, 4),
    "Q3_K": _Memory(4, 16, 1, 2),
    "Q2_K": _Memory(4, 16, 2, 4),
    "IQ4_XS": _Memory(4, 32, 1, 2),
}
_WIDENED = ("IQ4_NL", "IQ4_XS")
"""Types whose codes take eight bits without compiled code; see `IQ4_VALUES`."""
_TABLES = ("TQ1_0", "TQ2_0", *(name for name in _MEMORY if name[:3] in ("IQ1", "IQ2", "IQ3")))
"""Types that keep codes of a table everywhere."""


@dataclass(frozen=True, slots=True)
class Blocks(Format):
    """Weights of one type of blocks. `flat`: with one level of scales, float32 where the file has
    two, and with codes of eight bits where they are of a table."""

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
        return OpenedBlocks(self.type, tensors.stored(self.mark(names)), columns, names.weight)

    def nbytes(self, columns: int, depth: int) -> int:
        kept, name = _MEMORY[self.type.name], self.type.name
        bits, per_row = kept.bits, kept.per_row
        scales = depth // kept.group * kept.per_group
        if self.flat and kept.per_block:
            scales, per_row = depth // kept.group * 4, 0
        else:
            scales += -(-depth // self.type.values) * kept.per_block
        if self.flat and name in (*_WIDENED, *_TABLES):
            bits = 8
        return columns * (depth * bits // 8 + scales + per_row)

    def without_compiler(self) -> Blocks | None:
        if self.type.name in _TABLES:
            return self
        kept = _MEMORY[self.type.name]
        flat = kept.per_block > 0 or self.type.name in _WIDENED
        return None if kept.floored else Blocks(self.type, flat=flat)

    def in_one_piece(self) -> Blocks | None:
        flat = Blocks(self.type, flat=True)
        return flat if self.type.name in _TABLES else self.without_compiler()


class OpenedBlocks(Opened):
    """The blocks of a weight.

    Args:
        kind: their type.
        blocks: uint8 `[N, bytes of a row]`.
        order: int64 `[K]`, the place of every column; None: all are in their place.
        weight: its name, for messages.
    """

    def __init__(
        self, kind: BlockType, blocks: torch.Tensor, order: torch.Tensor | None, weight: str
    ) -> None:
        self._kind, self._blocks, self._order, self._weight = kind, blocks, order, weight

    @property
    def piece_bytes(self) -> int:
        # Blocks are taken apart in more steps than other codes, and tables of embeddings expanded.
        return PIECE_BYTES // 4

    def piece(self, rows: range, columns: range, unit: int) -> IntegerCodes:
        blocks = self._blocks[rows.start : rows.stop]
        if self._order is None:
            codes = self._codes(blocks, columns)
        else:
            codes = self._codes(
                blocks, range(blocks.shape[1] // self._kind.nbytes * self._kind.values)
            )
            codes = codes.of_columns(self._order).of_columns(columns)
        return codes

    def _codes(self, rows: torch.Tensor, columns: range) -> IntegerCodes:
        """Return the codes of some columns, from the blocks around them."""
        values, nbytes = self._kind.values, self._kind.nbytes
        first, last = columns.start // values, -(-columns.stop // values)
        decoded = decode(self._kind, rows[:, first * nbytes : last * nbytes])
        if not finite(decoded):
            raise CheckpointError(f"{self._weight} holds scales that are NaN or infinite")
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
