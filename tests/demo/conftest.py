"""The shipped checkpoints, and the recipe's modules on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlm_serve import Pipeline

sys.path.insert(0, str(Path(__file__).parents[2] / "train_demo"))


@pytest.fixture(scope="session", params=["demo", "demo-moe"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def pipe(model: str) -> Iterator[Pipeline]:
    with Pipeline(model) as opened:
        yield opened


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """All tests of this folder compute on one thread."""
