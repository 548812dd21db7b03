"""Rotary positions as data: frequencies, and YaRN's for contexts beyond the trained one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071), as transformers computes it: slow frequencies are divided by
    `factor`, fast ones stay, and those between are mixed.

    Attributes:
        factor: of the context's length.
        original: length of the context before it was extended, in tokens.
        fast, slow: rotations over the original context from which on a frequency stays, and up to
            which it is divided.
        whole: whether the bounds between them are rounded to whole frequencies.
        scale: factor of cosines and sines.
    """

    factor: float
    original: int
    fast: float
    slow: float
    whole: bool
    scale: float

    @property
    def context(self) -> int:
        """Length of the extended context, in tokens."""
        return int(self.original * self.factor)

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the frequencies of the extended context, from the periods of the original one."""
        dims = 2 * len(periods)
        low, high = (self._dim(turns, dims, theta) for turns in (self.fast, self.slow))
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        width = high - low or 0.001
        divided = (torch.arange(dims // 2, dtype=torch.float) - low) / width
        kept = 1 - divided.clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _dim(self, turns: float, dims: int, theta: float) -> float:
        """Return the place of the frequency that makes so many rotations in the original
        context."""
        return dims * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's own scale of cosines and sines for this factor."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rope:
    """`rotary_dim` of each head's dims are rotated; `sections` gives the number of the
    `rotary_dim / 2` frequencies for temporal, height and width position."""

    theta: float
    rotary_dim: int
    sections: tuple[int, int, int]
    yarn: Yarn | None = None

    @property
    def scale(self) -> float:
        """The factor of cosines and sines."""
        return 1.0 if self.yarn is None else self.yarn.scale

    def frequencies(self) -> torch.Tensor:
        """Return the angles per position, float32 `[rotary_dim / 2]`."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float)
        periods = self.theta ** (exponents / self.rotary_dim)
        return 1.0 / periods if self.yarn is None else self.yarn.frequencies(periods, self.theta)
