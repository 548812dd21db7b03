"""Row copies by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_runs(tensors: Sequence[torch.Tensor], runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy (source row, destination row, number of rows) runs in every tensor."""
    for tensor in tensors:
        for src, dst, count in runs:
            tensor[dst : dst + count].copy_(tensor[src : src + count])
