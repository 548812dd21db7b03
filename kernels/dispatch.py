"""The one place where a backend is chosen: by the device of an op's first tensor.

Each op `<op>.py` validates its arguments and calls `select(<op>_cpu.function, device)`. CPU tensors
run that function, which hands over to `<op>_compiled` where compiled kernels are wanted and know
such arguments; tensors of another device run the function of the same name and signature in the
sibling module `<op>_triton`, which is imported on first use, so that a machine without Triton never
imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar, cast

import torch

from vlm_serve.kernels.checks import KernelArgumentError

Function = TypeVar("Function", bound=Callable[..., Any])

_compiled: ContextVar[bool] = ContextVar("compiled kernels where there are any", default=False)
_triton_everywhere: ContextVar[bool] = ContextVar("Triton kernels for CPU tensors", default=False)


def select(cpu_function: Function, device: torch.device) -> Function:
    """The implementation of an op for a device.

    Args:
        cpu_function: the op's function in its `<op>_cpu` module.
        device: where the op's tensors live.

    Returns:
        A function of the same signature.

    Raises:
        KernelArgumentError: no implementation of the op for that device.
    """
    if device.type == "cpu" and not _triton_everywhere.get():
        return cpu_function
    return cast(Function, _load_triton(cpu_function.__module__, cpu_function.__name__))


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
    """Inside the block an op's CPU path takes compiled code where there is some for its arguments.

    Args:
        wanted: False leaves everything to torch.

    Raises:
        BuildError: from such an op, if `native.load` has not succeeded before.
    """
    token = _compiled.set(wanted)
    try:
        yield
    finally:
        _compiled.reset(token)


def compiled_wanted() -> bool:
    """Whether the caller is inside of a `compiled_kernels` block."""
    return _compiled.get()


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


@cache
def _load_triton(cpu_module: str, name: str) -> Callable[..., Any]:
    module = cpu_module.removesuffix("_cpu") + "_triton"
    try:
        return cast(Callable[..., Any], getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise KernelArgumentError("device", f"no Triton implementation of {name}") from error
