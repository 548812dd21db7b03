"""The one place where a backend is chosen.

An op's folder has its implementations side by side: `torch_cpu`, `compiled` and `triton`, each as
far as it has one, all of the same signature. Its `__init__` declares them as an `Op`, and its
public functions check their arguments and call that.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Generic, ParamSpec, TypeVar, cast

import torch

from vlm_serve.kernels.checks import KernelArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_CPU = torch.device("cpu")
_compiled: ContextVar[bool] = ContextVar("compiled kernels where there are any", default=False)
_triton_everywhere: ContextVar[bool] = ContextVar("Triton kernels for CPU tensors", default=False)


class Op(Generic[P, R]):
    """A computation in up to three implementations, one of which every call takes.

    Args:
        torch: for CPU tensors; for those of every device if there is no Triton kernel.
        compiled: for CPU tensors inside of a `compiled_kernels` block; it returns None, having done
            nothing, for arguments that it does not know.
        triton: "module:function" for tensors of other devices. The module is imported at the first
            such call, so that a machine without Triton never imports it.
    """

    __slots__ = ("_compiled", "_found", "_torch", "triton")

    def __init__(
        self,
        torch: Callable[P, R],
        *,
        compiled: Callable[P, R | None] | None = None,
        triton: str | None = None,
    ) -> None:
        self._torch = torch
        self._compiled = compiled
        self.triton = triton
        self._found: Callable[P, R] | None = None

    def __call__(self, device: torch.device, *args: P.args, **kwargs: P.kwargs) -> R:
        """Computes on a device, where all tensors among the arguments live.

        Raises:
            KernelArgumentError: no implementation for that device.
            BuildError: there is no library of compiled kernels, though they are wanted.
        """
        # Written for speed: a decode step at batch 1 makes some hundred of these calls. Comparing
        # devices takes a fraction of the time that their type does.
        on_cpu = device == _CPU or device.type == "cpu"
        if self.triton is not None and (not on_cpu or _triton_everywhere.get()):
            return (self._found or self.load_triton())(*args, **kwargs)
        if self._compiled is not None and on_cpu and _compiled.get():
            result = self._compiled(*args, **kwargs)
            if result is not None:
                return result
        return self._torch(*args, **kwargs)

    def load_triton(self) -> Callable[P, R]:
        """The Triton implementation, imported if it has not been.

        Raises:
            KernelArgumentError: there is none, or Triton is not installed.
        """
        module, _, name = (self.triton or "").partition(":")
        try:
            found = cast("Callable[P, R]", getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError, ValueError) as error:
            raise KernelArgumentError("device", f"no Triton implementation: {error}") from error
        self._found = found
        return found


@contextmanager
def triton_everywhere() -> Iterator[None]:
    """Inside the block CPU tensors go to the Triton kernels too. For tests, under Triton's
    interpreter (`TRITON_INTERPRET=1` before triton is imported), and for recording launches."""
    token = _triton_everywhere.set(True)
    try:
        yield
    finally:
        _triton_everywhere.reset(token)


@contextmanager
def compiled_kernels(wanted: bool = True) -> Iterator[None]:
    """Inside the block an op takes compiled code for CPU tensors where there is some for its
    arguments.

    Args:
        wanted: False leaves everything to torch.

    Raises:
        BuildError: from such an op, if `native_library.load` has not succeeded before.
    """
    token = _compiled.set(wanted)
    try:
        yield
    finally:
        _compiled.reset(token)


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Inside the block launches go to this device; of itself each thread has the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def describe(device: torch.device) -> str:
    """One line for the start-up log: which path the ops take on a device, and why."""
    if device.type == "cpu":
        reason = "" if torch.cuda.is_available() else " (no GPU found)"
        return f"kernels: torch CPU path, {torch.get_num_threads()} threads{reason}"
    if importlib.util.find_spec("triton") is None:
        return f"kernels: none for {device} (Triton is not installed)"
    return f"kernels: Triton on {device}"
