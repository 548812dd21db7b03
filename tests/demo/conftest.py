"""The shipped checkpoints, and the recipe's modules on the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlm_serve import Pipeline

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train_demo"))


@pytest.fixture(scope="session", params=["demo", "demo-moe"])
def pipe(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    with Pipeline(request.param) as opened:
        yield opened
