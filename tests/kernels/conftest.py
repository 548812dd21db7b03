"""What several kernel tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vlm_serve.kernels.dispatch import compiled_kernels


@pytest.fixture(params=["torch", "compiled"])
def cpu_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test on both of an op's CPU paths."""
    with compiled_kernels(request.param == "compiled"):
        yield
