"""Settings that must be in place before any test module is imported."""

from __future__ import annotations

import os

# Triton decides at its first import whether kernels run in the interpreter, and transformers
# imports it too. TRITON_INTERPRET=0 in the environment runs the kernels' tests on a GPU instead.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests run beside each other: threads that spin at a barrier keep the one that they wait for from
# its core. libgomp reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator

import pytest
from sweeps import MARKS


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first: at the end no worker is alone with one of them."""
    slow = {item.path for item in items if any(item.get_closest_marker(name) for name in MARKS)}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: in tiny models a second one costs more in waiting than it saves, and
    other workers have the other cores. Results do not depend on it, which tests of kernels show."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compiler() -> None:
    """For tests of compiled code; where it cannot be had they say why they are skipped."""
    from vlm_serve.kernels.native_build import BuildError
    from vlm_serve.kernels.native_library import load

    try:
        load()
    except BuildError as error:
        pytest.skip(f"there is no compiled code here: {error}")
