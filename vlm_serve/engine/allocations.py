"""Bytes that a run would allocate, counted on the device "meta", where nothing is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vlm_serve.kernels.triton_support import Launch, Target, record_launches

_TARGET = Target("cuda", 90)
"""Whose launches are prepared. Scratch memory is much the same on all."""
_GRAIN = 512
"""torch's CUDA allocator hands out multiples of this."""


def peak_of(run: Callable[[], object]) -> int:
    """Return the most bytes held by a run at a time, beyond those at its beginning.

    Triton's kernels are not run; what they write to is allocated by torch, and counts. Workspaces
    of libraries do not.

    Raises:
        KernelArgumentError: Triton is not installed.
    """
    with record_launches(_TARGET) as launches:
        allocations = _Allocations(launches)
        with allocations:
            run()
    return allocations.peak


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._launches = launches
        self._living: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A recorded launch holds its arguments, which are free by then.
        self._launches.clear()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = {each.untyped_storage()._cdata for each in _tensors([args, kwargs])}
        self._living = [each for each in self._living if not _expired(each[0])]
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if tensor.device.type == "meta" and storage._cdata not in known:
                size = -(-storage.nbytes() // _GRAIN) * _GRAIN
                self._living.append((_weak(storage), size))
                known.add(storage._cdata)
        self.peak = max(self.peak, sum(size for _, size in self._living))
        return result


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _expired(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
