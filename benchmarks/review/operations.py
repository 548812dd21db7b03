"""Counts torch's operations that launch something on a GPU, on the device meta, and their bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import checkout  # noqa: F401
import launch_counts
import torch


class Operations(launch_counts.Operations):
    """Counts operations inside the block, those that copy although they are called views too.

    Attributes:
        moved: bytes of arguments and results, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.counts.total()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.counts.total() > before:
            tensors = [each for each in (*args, result) if isinstance(each, torch.Tensor)]
            name = func.overloadpacket.__name__
            self.moved[name] += sum(each.numel() * each.element_size() for each in tensors)
        return result
