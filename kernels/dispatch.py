"""Choice of backend: the only place where an op's implementation is picked.

An op's folder holds its implementations side by side: `reference`, which is plain torch, and where
they exist `compiled` and `triton`, all with the same signature. Its `__init__` declares them as an
`Op`. The public functions there check their arguments and call that op.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, cast
from weakref import WeakSet

import torch

from vlm_serve.kernels.checks import KernelArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_CPU = torch.device("cpu")
_compiled: ContextVar[bool] = ContextVar("compiled kernels where there are any", default=False)
_triton_everywhere: ContextVar[bool] = ContextVar("Triton kernels for CPU tensors", default=False)


class Op(Generic[P, R]):
    """A computation with several implementations; each call runs one of them.

    Args:
        torch: for CPU tensors; for every device if there is no Triton kernel. Also what others are
            checked against.
        compiled: for CPU tensors inside a `compiled_kernels` block. It returns None, with nothing
            done, if it does not support the arguments.
        triton: "module:function" for tensors of other devices. The module is imported at the first
            such call, so a machine without Triton never imports it.
        others: further implementations for such tensors, "module:function" by name. `choose` puts
            one before `triton`'s, which then computes what the chosen one returns None for.
    """

    __slots__ = ("__weakref__", "_chosen", "_compiled", "_loaded", "others", "torch", "triton")
    _all: ClassVar[WeakSet[Op[..., Any]]] = WeakSet()

    def __init__(
        self,
        torch: Callable[P, R],
        *,
        compiled: Callable[P, R | None] | None = None,
        triton: str | None = None,
        others: Mapping[str, str] | None = None,
    ) -> None:
        self.torch = torch
        self._compiled = compiled
        self.triton = triton
        self.others = others or {}
        self._chosen: str | None = None
        self._loaded: Callable[P, R] | None = None
        self._all.add(self)

    def __call__(self, device: torch.device, *args: P.args, **kwargs: P.kwargs) -> R:
        """Compute on a device, on which all tensors among the arguments live.

        Raises:
            KernelArgumentError: no implementation for that device.
            BuildError: compiled kernels are enabled, but there is no library of them.
        """
        # On the hot path: a decode step at batch 1 makes some hundred of these calls. Comparing
        # devices is much faster than reading their type.
        on_cpu = device == _CPU or device.type == "cpu"
        if self.triton is not None and (not on_cpu or _triton_everywhere.get()):
            return (self._loaded or self.load_triton())(*args, **kwargs)
        if self._compiled is not None and on_cpu and _compiled.get():
            result = self._compiled(*args, **kwargs)
            if result is not None:
                return result
        return self.torch(*args, **kwargs)

    def on_triton(self, device: torch.device) -> bool:
        """Return True if a call for a device runs the Triton implementation."""
        return self.triton is not None and (device.type != "cpu" or _triton_everywhere.get())

    def load_triton(self) -> Callable[P, R]:
        """Return the Triton implementation; import it on first use.

        Raises:
            KernelArgumentError: there is none, or Triton is not installed.
        """
        implementation = self._load(self.triton or "")
        if self._chosen is not None:
            implementation = _either(self._load(self.others[self._chosen]), implementation)
        self._loaded = implementation
        return implementation

    @staticmethod
    def _load(target: str) -> Callable[P, R]:
        module, _, name = target.partition(":")
        try:
            return cast("Callable[P, R]", getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError, ValueError) as error:
            raise KernelArgumentError("device", f"no Triton implementation: {error}") from error

    def choose(self, name: str | None) -> None:
        """Let one of `others` compute on GPUs from now on, in this process; None: none of them.

        Raises:
            KernelArgumentError: there is none of that name.
        """
        if name is not None and name not in self.others:
            raise KernelArgumentError("name", f"no implementation is called {name}")
        self._chosen, self._loaded = name, None

    @classmethod
    def with_triton(cls) -> list[Op[..., Any]]:
        """Return all ops with a Triton implementation."""
        return [op for op in cls._all if op.triton is not None]

    def replace_triton(self, implementation: Callable[P, R] | None) -> Callable[P, R] | None:
        """Call another function in place of the Triton implementation; None restores it. Return
        the one before."""
        before, self._loaded = self._loaded, implementation
        return before


def _either(first: Callable[P, R | None], second: Callable[P, R]) -> Callable[P, R]:
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        result = first(*args, **kwargs)
        return second(*args, **kwargs) if result is None else result

    return run


@contextmanager
def triton_everywhere() -> Iterator[None]:
    """Send CPU tensors to the Triton kernels too, inside the block.

    For tests under Triton's interpreter (`TRITON_INTERPRET=1` before triton is imported), and for
    recording launches.
    """
    token = _triton_everywhere.set(True)
    try:
        yield
    finally:
        _triton_everywhere.reset(token)


@contextmanager
def compiled_kernels(wanted: bool = True) -> Iterator[None]:
    """Run compiled code for CPU tensors inside the block, where it supports the arguments.

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


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the plain implementations for CPU tensors inside the block, of ops within ops too."""
    with compiled_kernels(False):
        token = _triton_everywhere.set(False)
        try:
            yield
        finally:
            _triton_everywhere.reset(token)


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Direct launches inside the block to this device; a thread uses the first GPU otherwise."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def describe(device: torch.device) -> str:
    """Return a line for the start-up log: the path that ops take on a device, and why."""
    if device.type == "cpu":
        reason = "" if torch.cuda.is_available() else " (no GPU found)"
        return f"kernels: plain torch on the CPU, {torch.get_num_threads()} threads{reason}"
    if importlib.util.find_spec("triton") is None:
        return f"kernels: none for {device} (Triton is not installed)"
    return f"kernels: Triton on {device}"
