"""A checkpoint and a store for engines that share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from redis_server import StoreServer, running


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("dense"), CheckpointSpec())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    with running(tmp_path) as server:
        yield server
