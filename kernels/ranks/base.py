"""What every way of sharing a model has in common."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


class Ranks:
    """One of `size` ranks that compute the same steps, each with its part of the weights.

    This one is alone. All others call `begin` before a step and then, in the same order on every
    rank, the exchanges. What a rank gets is the same to the bit whatever shares the step.

    Args:
        rank: 0 ... size - 1.
        size: how many there are.

    Raises:
        RanksApartError: from an exchange: another rank has given up the step, or has not come in
            time.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def shared(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    def share(self, count: int) -> range:
        """This rank's part of so many things; parts differ by one at most."""
        first, last = (each * count // self.size for each in (self.rank, self.rank + 1))
        return range(first, last)

    def share_or_copy(self, count: int) -> range:
        """Likewise of heads that several ranks hold where there are fewer heads than ranks."""
        if count >= self.size:
            return self.share(count)
        own = self.rank * count // self.size
        return range(own, own + 1)

    def begin(self, step: int) -> None:
        """A step with a number higher than any before; all ranks have finished the last one."""

    def give_up(self) -> None:
        """This rank cannot go on with the step: the others are not to wait for it."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """float32 `[T, N]` of every rank, added in the order of the ranks, on every rank."""
        return part

    def columns(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """float32 `[R, share(count)]` of every rank beside each other, `[R, count]`, on rank 0; the
        others get what they gave."""
        del count
        return part

    def tell(self, tensor: torch.Tensor | None, root: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor of rank `root` on every rank; `like` has its shape and dtype."""
        del root, like
        assert tensor is not None, "who is alone asks itself"
        return tensor

    def record(self) -> ctypes.Structure | None:
        """How compiled steps meet the others; None if they cannot, or if there are none."""
        return None

    def close(self) -> None:
        """No exchange follows."""


def in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new tensor: the sum, element by element in the order of the parts."""
    total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
    for part in parts[2:]:
        total += part
    return total


ALONE = Ranks()
"""A model that is not shared."""
