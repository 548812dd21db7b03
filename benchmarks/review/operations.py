"""Counts torch's operations that launch something on a GPU, on the device meta."""

from __future__ import annotations

from collections import Counter
from typing import Any

import checkout  # noqa: F401
import torch
from launch_counts import NO_LAUNCH
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts operations inside the block.

    Attributes:
        counts: launches by name.
        hidden: those that are views by their schema, but copy: `.to()`, `.contiguous()`,
            `reshape`. A copy is told by its result's storage, which no argument has.
        moved: bytes of arguments and results, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.hidden: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in NO_LAUNCH:
            return result
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if not func.is_view:
            self.counts[name] += 1
            tensors += [result] if isinstance(result, torch.Tensor) else []
            self.moved[name] += sum(each.numel() * each.element_size() for each in tensors)
        elif isinstance(result, torch.Tensor) and result.device.type == "meta":
            known = {each.untyped_storage()._cdata for each in tensors}
            self.hidden[name] += result.untyped_storage()._cdata not in known
        return result
