"""Servers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from make_checkpoint import make_checkpoint
from serving import RunningServer, running, wait_for

from vlm_serve.preprocess.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="session")
def _fake_server(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    with running(FakeEngine(tokenizer)) as server:
        yield server


@pytest.fixture
def fake(_fake_server: RunningServer) -> Iterator[RunningServer]:
    """A server over a scripted engine. Afterwards nothing of the test's requests may be left."""
    _fake_server.engine.reset()
    yield _fake_server
    _fake_server.engine.reset()
    wait_for(lambda: _fake_server.service.requests.num_open == 0)
    wait_for(lambda: not _fake_server.engine.requests)
    assert _fake_server.service.admission.open_tokens == 0
    wait_for(lambda: _fake_server.service.admission.memory.held == 0)


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """All tests of this folder compute on one thread."""
