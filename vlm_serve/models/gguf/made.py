"""Tensors of a checkpoint as made from those of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Indices = Callable[[], torch.Tensor]
Change = Literal["", "less one", "decay", "frames"]


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor, and how it follows from one in a file.

    Attributes:
        source: name in the file.
        shape: in the checkpoint.
        index: in the file's first dimension, of a tensor that stacks experts.
        rows, columns: returns those to take, in their order; None: all.
        change: of the numbers. "less one": the file adds 1 to centred norms. "decay": it holds the
            negated exponential. "frames": `second` is the kernel of the second frame.
    """

    source: str
    shape: tuple[int, ...]
    index: int | None = None
    rows: Indices | None = None
    columns: Indices | None = None
    change: Change = ""
    second: str = ""


def grouped(key_heads: int, per_key: int, size: int, first: int = 0) -> Indices:
    """Return the rows of value heads in the order of their key heads.

    Files hold the first value head of every key head, then the second of every one, and so on.

    Args:
        key_heads: their number.
        per_key: value heads of each.
        size: rows of a value head.
        first: rows before them, which stay in place.
    """

    def indices() -> torch.Tensor:
        whole = torch.arange(key_heads * per_key * size).view(per_key, key_heads, size)
        moved = first + whole.transpose(0, 1).reshape(-1)
        return torch.cat([torch.arange(first), moved])

    return indices


def block_rows(groups: int, widths: tuple[int, ...], wanted: tuple[int, ...]) -> Indices:
    """Return some rows of every group, all of the first kind before those of the next.

    Args:
        groups: their number.
        widths: rows of each kind within a group.
        wanted: the kinds to take.
    """

    def indices() -> torch.Tensor:
        whole = torch.arange(groups * sum(widths)).view(groups, -1)
        kinds = torch.split_with_sizes(whole, widths, 1)
        return torch.cat([kinds[each].reshape(-1) for each in wanted])

    return indices


def span(first: int, count: int) -> Indices:
    """Return consecutive rows."""
    return lambda: torch.arange(first, first + count)
