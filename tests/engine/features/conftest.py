"""Two checkpoints between which weights change, and an engine that serves the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from families import SPECS
from weight_updates import both, changing

from vlm_serve.engine.engine import Engine


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return both(SPECS["text, tied"], tmp_path_factory.mktemp("text"))


@pytest.fixture
def engine(text: list[Path]) -> Iterator[Engine]:
    made = changing(text[0])
    yield made
    made.close()
