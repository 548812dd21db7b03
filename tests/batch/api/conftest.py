"""A server that keeps files, over a scripted engine, and its client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from batch_client import SIZE, Batcher
from fake_engine import FakeEngine
from make_checkpoint import make_checkpoint
from serving import RunningServer, running, wait_for

from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    """A server; afterwards no request and no memory of a batch may be left."""
    engine = FakeEngine(tokenizer, EngineConfig(block_size=16, max_num_seqs=4))
    with running(engine, ServerConfig(port=0, batch_store=SIZE)) as server:
        yield server
        engine.gate.set()
        wait_for(lambda: server.service.requests.num_open == 0)
        wait_for(lambda: not engine.requests)
        assert server.service.admission.open_tokens == 0


@pytest.fixture
def client(server: RunningServer) -> Iterator[Batcher]:
    client = Batcher(server)
    yield client
    client.api.close()
