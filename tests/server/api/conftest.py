"""A server over a real engine, whose cache is empty when a test begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import RunningServer, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig


@pytest.fixture(scope="module")
def _server(checkpoint: Path) -> Iterator[RunningServer]:
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="32MiB", max_model_len=2048)
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0, idle_check=False)) as server:
        yield server


@pytest.fixture
def server(_server: RunningServer) -> Iterator[RunningServer]:
    _server.engine.flush()
    yield _server
    _server.engine.check()
