"""Interface of the ranks that share a model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


class Ranks:
    """One of `size` ranks that compute the same steps, each with its part of the weights.

    This class is a single rank without others. With several, each rank calls `begin` before a step
    and then the exchanges, in the same order on every rank. The result of an exchange is the same
    to the bit, whatever shares the step.

    Args:
        rank: 0 ... size - 1.
        size: number of ranks.

    Raises:
        RanksApartError: from an exchange: another rank has aborted the step, or timed out.

    Attributes:
        begins_again: a step may follow one that failed on some rank.
    """

    begins_again = True

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def shared(self) -> bool:
        """True if there are other ranks."""
        return self.size > 1

    def share(self, count: int) -> range:
        """Return this rank's part of `count` items; parts differ by one at most."""
        first, last = (bound * count // self.size for bound in (self.rank, self.rank + 1))
        return range(first, last)

    def share_or_copy(self, count: int) -> range:
        """Return this rank's part of `count` heads.

        Where there are fewer heads than ranks, several ranks hold the same head.
        """
        if count >= self.size:
            return self.share(count)
        replica = self.rank * count // self.size
        return range(replica, replica + 1)

    def begin(self, step: int) -> None:
        """Begin a step, with a number above all before; all ranks have finished the last one."""

    def abort(self) -> None:
        """Abort the step, so that the other ranks stop waiting for this one."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum float32 `[T, N]` of all ranks in rank order; every rank gets the result."""
        return part

    def columns(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """Join float32 `[R, share(count)]` of all ranks side by side.

        Rank 0 gets `[R, count]`; the others get their own part back.
        """
        del count
        return part

    def broadcast(self, tensor: torch.Tensor | None, root: int, like: torch.Tensor) -> torch.Tensor:
        """Broadcast a tensor of rank `root` to all ranks; `like` has its shape and dtype."""
        del root, like
        assert tensor is not None, "a single rank is the root"
        return tensor

    def record(self) -> ctypes.Structure | None:
        """Return the record for compiled steps; None if unsupported, or for a single rank."""
        return None

    def close(self) -> None:
        """Release the ranks' resources; no exchange follows."""


def in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the parts into a new tensor, element by element in their order."""
    total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
    for part in parts[2:]:
        total += part
    return total


ALONE = Ranks()
"""A model that is not shared."""
