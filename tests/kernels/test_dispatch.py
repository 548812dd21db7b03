"""Which implementation an op takes."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from vlm_serve import kernels
from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.dispatch import Op, compiled_kernels, describe, triton_everywhere

CPU, META = torch.device("cpu"), torch.device("meta")


def torch_path(size: int, *, twice: bool) -> str:
    return f"torch {size} {twice}"


def compiled_path(size: int, *, twice: bool) -> str:
    return f"compiled {size} {twice}"


def compiled_if_small(size: int, *, twice: bool) -> str | None:
    return f"compiled {size} {twice}" if size < 10 else None


def triton_path(size: int, *, twice: bool) -> str:
    return f"triton {size} {twice}"


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where an op finds `triton_path`."""
    module = ModuleType("module_of_triton_path")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(module, "run", triton_path, raising=False)
    return f"{module.__name__}:run"


def test_compiled_code_is_for_what_it_knows(triton: str) -> None:
    op = Op(torch_path, compiled=compiled_if_small, triton=triton)
    assert op(CPU, 1, twice=True) == "torch 1 True"
    with compiled_kernels():
        assert op(CPU, 1, twice=True) == "compiled 1 True"
        assert op(CPU, 10, twice=False) == "torch 10 False"
        with compiled_kernels(False):
            assert op(CPU, 1, twice=True) == "torch 1 True"
        everything = Op(torch_path, compiled=compiled_path)
        assert everything(CPU, 10, twice=False) == "compiled 10 False"
        assert everything(META, 10, twice=False) == "torch 10 False"
        assert Op(torch_path)(CPU, 1, twice=True) == "torch 1 True"


def test_other_devices_are_for_triton(triton: str) -> None:
    op = Op(torch_path, compiled=compiled_path, triton=triton)
    with compiled_kernels():
        assert op(META, 3, twice=True) == "triton 3 True"
        with triton_everywhere():
            assert op(CPU, 3, twice=True) == "triton 3 True"
    assert Op(torch_path)(META, 3, twice=True) == "torch 3 True"


@pytest.mark.parametrize("name", ["no_such_module:run", "sys:no_such_function"])
def test_no_triton_implementation(name: str) -> None:
    op = Op(torch_path, triton=name)
    assert op(CPU, 1, twice=True) == "torch 1 True"
    with pytest.raises(KernelArgumentError, match="device"):
        op(META, 1, twice=True)


def ops() -> Iterator[tuple[str, Op[..., object]]]:
    """Every op that a module of the package declares."""
    for found in pkgutil.iter_modules(kernels.__path__):
        if found.ispkg:
            module = importlib.import_module(f"{kernels.__name__}.{found.name}")
            for name, value in vars(module).items():
                if isinstance(value, Op):
                    yield f"{found.name}.{name}", value


def test_triton_implementations_are_where_ops_say() -> None:
    pytest.importorskip("triton")
    named = dict(ops())
    assert len(named) >= 16
    for name, op in named.items():
        assert op.triton is None or callable(op.load_triton()), name


def test_the_path_is_described() -> None:
    assert "CPU" in describe(CPU)
    assert "Triton" in describe(META)
