"""Waits of the host, and copies to a device that it makes itself, counted without a GPU.

Inside a `Traffic` block tensors made for the device "cuda" are `Resident`: they compute on the CPU,
and say that they are on a GPU. A read of their values is a wait for all that is queued. A copy out
of pageable memory is synchronous, so it is counted too: new tensors from Python's numbers, lists in
an index, `.to` the device. As on a GPU, tensors of two devices do not meet, and `numpy` refuses.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cuda", 0)
_WAITS = {
    *("tolist", "item", "cpu", "nonzero", "masked_select", "equal", "allclose", "unique"),
    *("is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__"),
}
_FROM_HOST = {"tensor", "as_tensor", "asarray"}
_INDEXING = {"__getitem__", "__setitem__", "index_put_", "index_put"}
_MOVES = {"to", "cuda", "type_as"}


class Resident(torch.Tensor):
    """A tensor on a GPU that is not there."""


def resident(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one of the GPU."""
    return tensor.as_subclass(Resident)


class Traffic(TorchFunctionMode):
    """Counts waits and copies inside the block.

    Attributes:
        waits: reads of values on the device, by function.
        copies: synchronous copies to the device, by function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        mine = any(isinstance(each, Resident) for each in tree_leaves((args, kwargs)))
        if name == "__get__":
            result = func(*_plain(args))
            return GPU if mine and isinstance(result, torch.device) else _as(result, mine)
        if name == "pin_memory":  # which a machine without a GPU has not
            return args[0].clone()
        target = _target(args, kwargs, name)
        assert not (mine and name == "numpy"), "numpy reads no memory of a GPU"
        if name in _MOVES and target is not None:
            return self._moved(func, name, args, kwargs, target)
        if mine and (name in _WAITS or (name in _INDEXING and _masks(args))):
            self.waits[name] += 1
        if name in _INDEXING and mine:
            self.copies[name] += _host_parts(args[1:])
        elif name == "copy_" and mine:
            one, other = (isinstance(each, Resident) for each in args[:2])
            free = kwargs.get("non_blocking", False)
            self.copies[name] += one and not other and not free
            self.waits[name] += other and not one and not free
        elif mine:
            hosts = [each for each in tree_leaves((args, kwargs)) if _is_host(each)]
            assert not hosts, f"{name} of tensors on two devices"
        made = target is not None and target.type == "cuda"
        self.copies[name] += made and name in _FROM_HOST
        if made:
            kwargs["device"] = torch.device("cpu")
        result = func(*_plain(args), **_plain(kwargs))
        return _as(result, (mine and name != "cpu") or made)

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any, target: torch.device) -> Any:
        """Convert a tensor, or copy it from one side to the other."""
        mine, there = isinstance(args[0], Resident), target.type == "cuda"
        if not kwargs.get("non_blocking", False):
            self.copies[name] += there and not mine
            self.waits[name] += mine and not there
        if name == "cuda":
            return _as(_plain(args[0]).clone(), True)
        kinds = torch.device, str
        args, kwargs = tree_map_only(kinds, lambda device: torch.device("cpu"), (args, kwargs))
        kwargs.pop("non_blocking", None)
        result = func(*_plain(args), **_plain(kwargs))
        return _as(result.clone() if there != mine else result, there)


def _plain(values: Any) -> Any:
    return tree_map_only(Resident, lambda each: each.as_subclass(torch.Tensor), values)


def _as(result: Any, mine: bool) -> Any:
    return tree_map_only(torch.Tensor, resident, result) if mine else result


def _target(args: Any, kwargs: dict[str, Any], name: str) -> torch.device | None:
    """Return the device that a call names; None: it names none."""
    named = [*args, *kwargs.values()] if name in _MOVES else [kwargs.get("device")]
    if name == "cuda":
        return GPU
    for each in named:
        if isinstance(each, (str, torch.device)):
            return torch.device(each)
        if isinstance(each, torch.Tensor) and each is not args[0]:
            return GPU if isinstance(each, Resident) else torch.device("cpu")
    return None


def _is_host(value: Any) -> bool:
    """Return True for a tensor that a GPU's cannot be computed with: those of one number can."""
    return isinstance(value, torch.Tensor) and not isinstance(value, Resident) and value.dim() > 0


def _indexes(args: Any) -> tuple[Any, ...]:
    index = args[1]
    return tuple(index) if isinstance(index, tuple) else (index,)


def _masks(args: Any) -> bool:
    return any(
        isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in _indexes(args)
    )


def _host_parts(values: Any) -> int:
    """Return how many parts of an index or of new values come from the host: lists and tensors."""
    count = 0
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        count += sum(isinstance(part, list) or _is_host(part) for part in parts)
    return count
