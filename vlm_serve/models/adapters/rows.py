"""Rows of a model's modules in its projections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rows:
    """A module's rows in a projection.

    Attributes:
        module: its name.
        sizes: (out, in) of the whole module.
        ranges: of its rows, in their order.
        columns: of its columns.
    """

    module: str
    sizes: tuple[int, int]
    ranges: tuple[range, ...]
    columns: range
