"""Low-rank changes as a GPU's kernels find them: addresses of factors, and rows by adapter.

An adapter has a record for each projection, in one table for all adapters of a step. Rows are
sorted by adapter and cut into tiles, each of one adapter. So a kernel reads an adapter's factors
once for many rows, and rows of several adapters take one launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vlm_serve.kernels.triton_support import to_device

HEAD, PART, MOST_PARTS = 6, 6, 8
"""Numbers of a record: those at its beginning, those of a part, and its most parts."""
RECORD = HEAD + PART * MOST_PARTS
FIRST_UP = HEAD + 4
"""Place of the address of the first part's B."""
TILE = 16
"""Rows of a tile, the smallest dot."""
RANKS = 16
"""Elements of u computed at a time."""
SPAN = 1024
"""Depth of a part of the sums."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Number of a factor's dtype in a record."""


class Tiles(NamedTuple):
    """Rows by adapter.

    Attributes:
        order: rows, those of a tile side by side.
        bounds: of each tile: its first place in `order`, the one behind its last, its adapter.
    """

    order: list[int]
    bounds: list[tuple[int, int, int]]

    @classmethod
    def of(cls, adapters: Sequence[int]) -> Tiles:
        """Sort rows by the number of their adapter, and leave out those of -1."""
        own = [row for row, each in enumerate(adapters) if each >= 0]
        order = sorted(own, key=adapters.__getitem__)
        return cls(order, list(_cut([adapters[row] for row in order])))

    @staticmethod
    def most(rows: int, adapters: int) -> int:
        """Return the most tiles of so many rows with so many adapters."""
        return rows // TILE + min(rows, adapters)


def _cut(adapters: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the tiles of sorted rows."""
    first = 0
    for place in range(1, len(adapters) + 1):
        ends = place == len(adapters) or adapters[place] != adapters[first]
        if ends or place - first == TILE:
            yield first, place, adapters[first]
            first = place


@dataclass(frozen=True)
class Groups:
    """The rows of a step by adapter, on a device.

    Attributes:
        order: int32, see `Tiles`.
        bounds: int32 `[tiles, 3]`; a tile may be empty.
        adapters: int32 `[T]`, the number of each row's adapter, or -1.
        changed, plain: int32, the rows with an adapter and those without, which may have some of
            the others behind them; None if only the device knows them.
    """

    order: torch.Tensor
    bounds: torch.Tensor
    adapters: torch.Tensor
    changed: torch.Tensor | None = None
    plain: torch.Tensor | None = None

    @classmethod
    def of(cls, adapters: Sequence[int], device: torch.device, least: int = 0) -> Groups:
        """Send the groups of rows to a device, in one copy.

        Args:
            adapters: of the rows, -1 for none.
            device: of the kernels.
            least: fewest rows of `plain`, unless there are none: some that are changed make up
                for others.
        """
        tiles = Tiles.of(adapters)
        plain = [row for row, each in enumerate(adapters) if each < 0]
        if plain:
            plain += tiles.order[: max(0, least - len(plain))]
        tables = to_device(
            {
                "order": tiles.order,
                "bounds": [each for tile in tiles.bounds for each in tile],
                "adapters": adapters,
                "plain": plain,
            },
            device,
        )
        bounds = tables["bounds"].view(-1, 3)
        order = tables["order"]
        return cls(order, bounds, tables["adapters"], order, tables["plain"])


class Site(NamedTuple):
    """A projection's changes for the rows of a step.

    Attributes:
        groups: the rows.
        records: int64 `[adapters, RECORD]`, of this projection.
        width: most elements of u.
    """

    groups: Groups
    records: torch.Tensor
    width: int


class ExpertSites(NamedTuple):
    """The changes of experts whose weights lie in one piece: those of gate and up, in parts 0 and
    1, and those of down."""

    gate_up: Site
    down: Site


class Reduced(NamedTuple):
    """The elements of u of rows, for kernels that multiply them by B.

    Attributes:
        u: float32 `[splits, T, width]`, sums over parts of the depth; of rows with an adapter.
        site: the projection.
    """

    u: torch.Tensor
    site: Site
