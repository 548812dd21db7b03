"""Sums over one row of logits, with bits from that row alone, on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ALIGNED = 8
"""Numbers of float32 between two addresses of equal alignment on a GPU."""
_UNITS = 2.0**52
"""Units of a probability: their sum is exact in float64."""


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of rows, float32 `[..., vocab]`.

    On a GPU torch adds a row's numbers in an order that depends on where in memory it begins. So
    rows of an odd length are padded: all begin at addresses of one kind.
    """
    vocab, wide = logits.shape[-1], logits.float()
    if vocab % _ALIGNED:  # a padding of nothing would copy the rows
        wide = F.pad(wide, (0, -vocab % _ALIGNED), value=float("-inf"))
    return torch.log_softmax(wide, dim=-1)[..., :vocab]


def running_sum(probs: torch.Tensor) -> torch.Tensor:
    """Return the sums of float64 `[n]` probabilities up to and including each.

    A GPU adds the parts of a scan as they become ready, in any order. Whole numbers have the same
    sum in each.
    """
    return probs.cumsum(0) if probs.device.type == "cpu" else whole_sums(probs)


def whole_sums(probs: torch.Tensor) -> torch.Tensor:
    """Return `running_sum` of each row, `[..., n]`, in whole units of a probability."""
    return (probs * _UNITS).long().cumsum(-1).double() / _UNITS
