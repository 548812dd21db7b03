"""Plain weights quantised during loading."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlm_serve.kernels.linear import Part
from vlm_serve.kernels.linear.quantising import group_of, num_bytes


@dataclass(frozen=True, slots=True)
class OnLoad:
    """Codes made at load time: bits, and the number of k per scale."""

    bits: int
    group: int

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"int{self.bits}"

    def nbytes(self, columns: int, depth: int) -> int:
        """Return the bytes of `[N, K]` in memory; K may be a shard of a row's."""
        return num_bytes(columns, depth, self.bits, math.gcd(self.group, depth))


def loading_format(bits: int, part: Part, depth: int) -> OnLoad | None:
    """Return a part's format with `--quantization`; None: it stays as it is.

    Args:
        bits: requested bits, 4, 6 or 8.
        part: with its minimum of bits.
        depth: of the rows that are loaded.
    """
    bits = max(bits, part.least_bits)
    group = group_of(bits, depth) if bits <= 8 else None
    return None if group is None else OnLoad(bits, group)
