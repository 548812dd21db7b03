"""Settings that must be in place before any test module is imported."""

from __future__ import annotations

import os

# Triton decides at its first import whether kernels run in the interpreter, and transformers
# imports it too. TRITON_INTERPRET=0 in the environment runs the kernels' tests on a GPU instead.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests run beside each other: threads that spin at a barrier keep the one that they wait for from
# its core. libgomp reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest


@pytest.fixture(scope="session")
def compiler() -> None:
    """For tests of compiled code; where it cannot be had they say why they are skipped."""
    from vlm_serve.kernels.native_build import BuildError
    from vlm_serve.kernels.native_library import load

    try:
        load()
    except BuildError as error:
        pytest.skip(f"there is no compiled code here: {error}")
