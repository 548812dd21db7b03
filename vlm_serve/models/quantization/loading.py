"""Plain weights that are quantised while they are loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlm_serve.kernels.linear import Part
from vlm_serve.kernels.linear.quantising import group_of, num_bytes


@dataclass(frozen=True, slots=True)
class OnLoad:
    """Codes that no file holds: bits, and how many k share a scale."""

    bits: int
    group: int

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"int{self.bits}"

    def nbytes(self, columns: int, depth: int) -> int:
        """What `[N, K]` takes in memory, whose K may be a shard of a row's."""
        return num_bytes(columns, depth, self.bits, math.gcd(self.group, depth))


def loading_format(bits: int, part: Part, depth: int) -> OnLoad | None:
    """What a part becomes with `--quantization`; None: it stays as it is.

    Args:
        bits: that are wanted, 4, 6 or 8.
        part: says what it may get at least.
        depth: of the rows that are loaded.
    """
    bits = max(bits, part.least_bits)
    group = group_of(bits, depth) if bits <= 8 else None
    return None if group is None else OnLoad(bits, group)
