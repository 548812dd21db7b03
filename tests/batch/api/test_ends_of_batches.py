"""How batches end before their last request, and what is left of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from batch_client import CHAT, SIZE, Batcher, line, slow, stalled
from fake_engine import FakeEngine
from serving import RunningServer, running, wait_for

from vlm_serve.batch import batches as all_batches
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

if TYPE_CHECKING:
    import openai


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai
    import openai


def test_a_cancelled_batch_keeps_its_answers(server: RunningServer, client: Batcher) -> None:
    slow(server)
    batch = stalled(server, client)
    assert len(server.engine.requests) <= 3, "three quarters of the four places"
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.api.files.delete(batch.input_file_id)
    cancelling = client.api.batches.cancel(batch.id)
    assert cancelling.status == "cancelling" and cancelling.cancelling_at
    batch = client.ended(batch)
    assert batch.status == "cancelled" and batch.cancelled_at >= batch.cancelling_at
    assert len(client.rows(batch.output_file_id)) == batch.request_counts.completed == 2
    assert batch.error_file_id is None
    server.engine.gate.set()
    wait_for(lambda: not server.engine.requests)
    assert client.api.files.delete(batch.input_file_id).deleted
    wait_for(lambda: server.service.admission.memory.held == 0)


def test_a_batch_that_waits_can_be_cancelled(server: RunningServer, client: Batcher) -> None:
    slow(server)
    first = stalled(server, client)
    second = client.start(line("a"))
    assert client.api.batches.retrieve(second.id).status == "validating"
    assert client.api.batches.cancel(second.id).status == "cancelled"
    client.api.files.delete(second.input_file_id)
    server.engine.gate.set()
    assert client.ended(first).request_counts.completed == 8


def test_a_window_that_ends(server: RunningServer, client: Batcher) -> None:
    slow(server)
    batch = stalled(server, client, window="2s")
    waiting = client.start(line("a"), window="1s")
    batch = client.ended(batch)
    assert batch.status == "expired" and batch.expired_at >= batch.expires_at
    assert len(client.rows(batch.output_file_id)) == 2
    errors = client.rows(batch.error_file_id)
    assert len(errors) == batch.request_counts.failed == 6
    assert {row["error"]["code"] for row in errors.values()} == {"batch_expired"}
    assert all(row["response"] is None for row in errors.values())
    waiting = client.ended(waiting)
    assert waiting.status == "expired" and waiting.request_counts.total == 0
    server.engine.gate.set()


def test_a_store_that_fills_ends_the_batch_and_keeps_its_answers(
    server: RunningServer, client: Batcher
) -> None:
    server.engine.answer = "x" * 2000
    file = client.upload(*[line(str(n)) for n in range(40)])
    room = client.api.files.create(file=("a", b"x" * (SIZE - 40_000)), purpose="batch")
    batch = client.api.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
    batch = client.ended(batch)
    assert batch.status == "failed"
    assert [each.code for each in batch.errors.data] == ["batch_store_full"]
    assert "--batch-store" in batch.errors.data[0].message
    rows = client.rows(batch.output_file_id)
    assert 5 < len(rows) == batch.request_counts.completed < 40
    client.api.files.delete(room.id)


def test_an_engine_that_stops_ends_the_batch(server: RunningServer, client: Batcher) -> None:
    slow(server)
    batch = stalled(server, client)
    server.engine.alive = False
    server.engine.gate.set()
    batch = client.ended(batch)
    assert batch.status == "failed" and batch.errors.data[0].code == "engine_stopped"
    assert len(client.rows(batch.output_file_id)) >= 2
    server.engine.alive = True


def test_a_server_that_stops_ends_its_batches_at_once(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, EngineConfig(block_size=16, max_num_seqs=4))
    config = ServerConfig(port=0, batch_store=SIZE, shutdown_timeout=60)
    with running(engine, config) as server:
        client = Batcher(server)
        slow(server)
        batch, waiting = stalled(server, client), client.start(line("a"))
        file = client.upload(line("b"))
        folder = Path(server.files._folder.path)
        assert len(list(folder.iterdir())) >= 3
        server.service.admission.requests.num_open += 1  # something else keeps the server up
        start = time.monotonic()
        server.server.handle_exit(15, None)
        for each in (batch, waiting):
            ended = client.ended(each)
            assert ended.status == "failed" and ended.errors.data[0].code == "shutting_down"
        assert len(client.rows(client.ended(batch).output_file_id)) == 2
        with pytest.raises(openai.APIStatusError, match="shutting down"):
            client.api.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        assert time.monotonic() - start < 20
        engine.gate.set()
        client.api.close()
        server.service.admission.requests.num_open -= 1
    assert not folder.exists()


def test_the_oldest_batches_that_ended_are_forgotten(
    server: RunningServer, client: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_batches, "MAX_BATCHES", 2)
    first, second = (client.ended(client.start(line("a"))) for _ in range(2))
    slow(server)
    third = stalled(server, client)
    assert [each.id for each in client.api.batches.list()] == [third.id, second.id]
    assert client.rows(first.output_file_id), "its files stay"
    fourth = client.start(line("a"))
    with pytest.raises(openai.RateLimitError, match="have not ended"):
        client.start(line("a"))
    server.engine.gate.set()
    assert client.ended(third).status == client.ended(fourth).status == "completed"
