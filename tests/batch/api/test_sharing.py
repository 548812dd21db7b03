"""What batches leave to each other and to requests: places, prompt tokens, owners."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from batch_client import CHAT, SIZE, Batcher, answered, line
from fake_engine import FakeEngine
from serving import RunningServer, running, wait_for

from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.answers.generation import BEHIND
from vlm_serve.server.config import ServerConfig

if TYPE_CHECKING:
    import openai


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai
    import openai


def test_rows_run_behind_requests_and_in_a_bounded_number(
    server: RunningServer, client: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, seen, most = server.engine.submit, list[int](), 0

    def noted(*args: Any, priority: int = 0, **options: Any) -> str:
        nonlocal most
        seen.append(priority)
        most = max(most, len(server.engine.requests) + 1)
        name: str = submit(*args, priority=priority, **options)
        return name

    monkeypatch.setattr(server.engine, "submit", noted)
    lines = [line(str(n), f"{n} question", body={"priority": -(n % 3)}) for n in range(9)]
    server.engine.gate.clear()
    batch = client.start(*lines)
    wait_for(lambda: len(server.engine.requests) == 3)
    time.sleep(0.2)
    server.engine.gate.set()
    batch = client.ended(batch)
    assert batch.request_counts.completed == 9
    assert sorted(seen) == [BEHIND - 2] * 3 + [BEHIND - 1] * 3 + [BEHIND] * 3
    assert most == 3
    seen.clear()
    assert server.chat(priority=1 << 31).status_code == 200
    assert seen == [1 << 31] and seen[0] < BEHIND - (1 << 31)


def test_the_first_of_those_with_a_common_beginning_runs_alone(
    server: RunningServer, client: Batcher
) -> None:
    common = "the same beginning " * 40
    server.engine.gate.clear()
    batch = client.start(*[line(str(n), f"{common}{n}") for n in range(5)])
    wait_for(lambda: len(server.engine.requests) == 1)
    time.sleep(0.3)
    texts = [call["messages"][0]["content"] for call in server.engine.preprocessor.calls]
    assert texts == [f"{common}0"]
    server.engine.gate.set()
    assert client.ended(batch).request_counts.completed == 5


def test_rows_have_the_owner_of_their_batch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("key-a: alice\nkey-b: bob\n")
    config = ServerConfig(port=0, batch_store=SIZE, api_key=("plain",), tenant_keys=str(keys))
    with running(FakeEngine(tokenizer), config) as server:
        clients = {key: Batcher(server, key) for key in ("plain", "key-a", "key-b")}
        batches = {}
        for key, client in clients.items():
            batch = client.start(line("a"), line("b", body={"cache_salt": "own"}))
            batches[key] = client.ended(batch)
            salts = {call["cache_salt"] for call in server.engine.preprocessor.calls}
            server.engine.preprocessor.calls.clear()
            assert (
                salts
                == {
                    "plain": {"", "own"},
                    "key-a": {"tenant:alice"},
                    "key-b": {"tenant:bob"},
                }[key]
            )
        for key, client in clients.items():
            assert [each.id for each in client.api.batches.list()] == [batches[key].id]
            assert len(client.rows(batches[key].output_file_id)) == 2
            for other in batches.keys() - {key}:
                with pytest.raises(openai.NotFoundError):
                    client.api.batches.retrieve(batches[other].id)
                with pytest.raises(openai.NotFoundError):
                    client.api.batches.cancel(batches[other].id)
                with pytest.raises(openai.NotFoundError):
                    client.api.files.content(batches[other].output_file_id)
                with pytest.raises(openai.NotFoundError):
                    client.api.batches.create(
                        input_file_id=batches[other].input_file_id,
                        endpoint=CHAT,
                        completion_window="24h",
                    )
            client.api.close()


def test_owners_do_not_wait_for_each_other(tokenizer: Tokenizer) -> None:
    config = ServerConfig(port=0, batch_store=SIZE, api_key=("one", "two"))
    engine = FakeEngine(tokenizer, EngineConfig(block_size=16, max_num_seqs=4))
    with running(engine, config) as server:
        one, two = Batcher(server, "one"), Batcher(server, "two")
        long = one.start(*[line(str(n), f"{n} question") for n in range(300)])
        short = two.ended(two.start(line("a"), line("b", "other")))
        assert short.request_counts.completed == 2
        assert one.api.batches.retrieve(long.id).status == "in_progress"
        assert one.ended(long).request_counts.completed == 300
        one.api.close()
        two.api.close()


def test_a_full_queue_is_waited_for(server: RunningServer, client: Batcher) -> None:
    limit = 2 * (server.service.config.max_queued_requests + server.engine.config.max_num_seqs)
    server.service.requests.num_open += limit
    batch = client.start(line("a"))
    wait_for(lambda: client.api.batches.retrieve(batch.id).status == "in_progress")
    time.sleep(0.5)
    assert answered(client, batch) == 0
    server.service.requests.num_open -= limit
    assert client.ended(batch).request_counts.completed == 1


def test_rows_leave_prompt_tokens_to_others(server: RunningServer, client: Batcher) -> None:
    most = server.service.config.max_queued_tokens
    server.service.admission.open_tokens += most - 1
    batch = client.start(line("a"))
    wait_for(lambda: client.api.batches.retrieve(batch.id).status == "in_progress")
    assert server.chat().status_code == 200
    time.sleep(0.5)
    assert answered(client, batch) == 0
    server.service.admission.open_tokens -= most - 1
    assert client.ended(batch).request_counts.completed == 1
