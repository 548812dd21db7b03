"""A server over a real engine, whose cache is empty when a test begins. The engine is in the tests'
process, and again in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from serving import RunningServer, running

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.remote.engine import RemoteEngine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

CONFIG = EngineConfig(dtype="float32", block_size=16, cache_memory="32MiB", max_model_len=2048)
OPTIONS = ServerConfig(port=0, idle_check=False)


@pytest.fixture(scope="module")
def _here(checkpoint: Path) -> Iterator[RunningServer]:
    with running(Engine.from_checkpoint(str(checkpoint), CONFIG), OPTIONS) as server:
        yield server


@pytest.fixture(scope="session")
def _apart(checkpoint: Path) -> Iterator[RunningServer]:
    with running(RemoteEngine(str(checkpoint), CONFIG), OPTIONS) as server:
        yield server


@pytest.fixture(params=["_here", pytest.param("_apart", marks=pytest.mark.processes)])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    server = cast("RunningServer", request.getfixturevalue(request.param))
    engine: Any = server.engine
    engine.flush()
    yield server
    engine.check()
