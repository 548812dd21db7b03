"""Captured graphs on a fake device: a log of operations and launches, over memory that is reused.

A capture computes nothing. It logs torch's operations (a dispatch mode) and Triton's launches (what
`triton_support.launch` would run), with the tensors that they saw, and a replay runs that log. So a
replay follows nothing that was bound to another tensor since, as on a GPU.

The device's own memory is `Memory`: what is freed is overwritten, and the next tensor of its size
lies there. A log names memory and does not keep it: it reads and writes whatever lies there.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from vlm_serve.kernels import triton_support
from vlm_serve.kernels.triton_support import Launch

POISON = 0xFF
"""Byte of memory that nobody has written: NaN in floating point, -1 in integers."""
REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "_pin_memory")
"""Operations that a stream under capture cannot do: wait for a value, take one from the host."""
_READS = (
    *(torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.cpu),
    *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__),
)
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_SMALLEST = 512
"""Bytes of the smallest block."""


class Memory:
    """Memory of a device in blocks. A block is free as soon as no tensor lies in it; then its bytes
    are overwritten, and the next tensor of about its size gets it."""

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the form of another one."""
        places = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        flat = torch.from_numpy(self._block((places + 1) * tensor.element_size()))
        return _formed(flat, tensor, 0)

    def named(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the same place as a tensor that keeps no memory; None: it lies elsewhere."""
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage.data_ptr())
        if block is None or not tensor.numel():
            return None
        return _formed(torch.from_numpy(block), tensor, int(tensor.storage_offset()))

    def _block(self, num_bytes: int) -> np.ndarray[Any, Any]:
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free:
            block = free.pop()
        else:
            block = np.full(size, POISON, dtype=np.uint8)
            self._blocks[block.ctypes.data] = block
        handle = block[:]  # Lives as long as the tensors in it.
        weakref.finalize(handle, _release, block, free).atexit = False
        return handle


def _release(block: np.ndarray[Any, Any], free: list[np.ndarray[Any, Any]]) -> None:
    block.fill(POISON)
    free.append(block)


def _formed(flat: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    return flat.view(like.dtype).as_strided(like.shape, like.stride(), offset)


class Eager(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts results of operations into a device's memory.

    Args:
        memory: the device's.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            return result
        known = _storages((args, kwargs))

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu" or _storages(tensor) <= known:
                return tensor
            own = self._memory.empty_like(tensor)
            if func.overloadpacket.__name__ not in _ALLOCATIONS:
                own.copy_(tensor)
            return own

        return tree_map_only(torch.Tensor, placed, result)


class Graph:
    """A log of work, with the methods of `torch.cuda.CUDAGraph`.

    Args:
        queue: queues work on the device.
    """

    def __init__(self, queue: Callable[[Callable[[], None]], None]) -> None:
        self.log: list[Callable[[], None]] = []
        self._queue = queue

    def replay(self) -> None:
        self._queue(self._run)

    def _run(self) -> None:
        # Padding may be computed from memory that nobody wrote, of which numpy would warn.
        with torch.inference_mode(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for work in self.log:
                work()


class _Logging(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs operations and launches without computing them.

    Args:
        log: to add to.
        pool: memory of results.
        memories: those of the device, with the pool.
    """

    def __init__(
        self, log: list[Callable[[], None]], pool: Memory, memories: Sequence[Memory]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._pool, self._memories = log, pool, memories

    def append(self, launch: Launch) -> None:
        """Log a launch, as `record_launches` collects them."""
        with _disable_current_modes():
            arguments = self._named(launch.arguments)
        self._log.append(lambda: launch.kernel[launch.grid](**arguments, **launch.options))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        refuse(func, args)
        if func._schema.is_mutable:
            inputs = self._named((args, kwargs))
            self._log.append(lambda: func(*inputs[0], **inputs[1]))
            return _written(func, args, kwargs)
        if func.is_view:
            # `.to()` and `reshape` are such by their schema, and copy if they must.
            result = func(*args, **kwargs)
            if _storages(result) <= _storages((args, kwargs)):
                return result
        else:
            result = _form(func, args, kwargs)
            if result is None:
                return func(*args, **kwargs)
        result = tree_map_only(torch.Tensor, self._pool.empty_like, result)
        outputs = self._named(result)
        if name in _ALLOCATIONS:
            # What an earlier replay left there is nothing to rely on.
            self._log.append(_overwritten(outputs))
        else:
            self._log.append(_again(func, self._named((args, kwargs)), outputs))
        return result

    def _named(self, values: Any) -> Any:
        """Return arguments whose tensors keep none of the device's memory."""

        def named(tensor: torch.Tensor) -> torch.Tensor:
            places = (memory.named(tensor) for memory in self._memories)
            return next((place for place in places if place is not None), tensor)

        return tree_map_only(torch.Tensor, named, values)


def _overwritten(tensor: torch.Tensor) -> Callable[[], None]:
    block = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())

    def overwrite() -> None:
        block.fill_(POISON)

    return overwrite


def _again(func: Any, inputs: Any, outputs: Any) -> Callable[[], None]:
    targets = tree_leaves(outputs)

    def again() -> None:
        results = tree_leaves(func(*inputs[0], **inputs[1]))
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)

    return again


def _form(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return an operation's results on the device "meta": their forms. None if they have no memory
    of their own."""

    def form(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(torch.Tensor, form, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    result = func(*args, **kwargs)
    return None if _storages(result) <= _storages((args, kwargs)) else result


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what an operation returns that writes its arguments: those that it writes."""
    if not func._schema.returns:
        return None
    written = [
        kwargs[each.name] if each.name in kwargs else args[place]
        for place, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return written[0] if len(written) == 1 else tuple(written)


def _storages(values: Any) -> set[int]:
    """Return which memory the tensors among some values lie in; that of none is nowhere."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    return {each.untyped_storage()._cdata for each in tensors if each.numel()}


def refuse(func: Any, args: Any) -> None:
    """Raise AssertionError for an operation that a stream under capture cannot do."""
    name = func.overloadpacket.__name__
    masks = name == "index" and any(
        each is not None and each.dtype == torch.bool for each in args[1]
    )
    if masks or name in REFUSED:
        raise AssertionError(f"{func} under capture")


class _NoReads(TorchFunctionMode):
    """Refuses reads by the host, which operations of the host's tensors do not show."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _READS, f"{func} under capture"
        return func(*args, **(kwargs or {}))


@contextmanager
def logging(graph: Graph, pool: Memory, memory: Memory) -> Iterator[None]:
    """Log into a graph what the block asks of a device.

    Args:
        graph: the graph.
        pool: memory of its results.
        memory: the device's other memory.
    """
    mode = _Logging(graph.log, pool, (pool, memory))
    token = triton_support._recording.set(mode)  # type: ignore[arg-type]
    try:
        with _NoReads(), mode:
            yield
    finally:
        triton_support._recording.reset(token)
