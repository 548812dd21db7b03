"""Batches, driven by openai-python with its strictest parsing, over a scripted engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import FakeEngine
from serving import RunningServer, running, wait_for

from vlm_serve.batch import batches as all_batches
from vlm_serve.config import EngineConfig
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.priority import BEHIND

if TYPE_CHECKING:
    import openai

CHAT: Any = "/v1/chat/completions"
SIZE = 4 << 20


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai
    import openai


class Batcher:
    """A client with the steps that most tests need."""

    def __init__(self, server: RunningServer, key: str = "none") -> None:
        self.api = openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key=key,
            max_retries=0,
            _strict_response_validation=True,
        )

    def upload(self, *lines: Any) -> str:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
        content = "\n".join(texts).encode("utf-8", "surrogatepass")
        return self.api.files.create(file=("in.jsonl", content), purpose="batch").id

    def start(self, *lines: Any, endpoint: Any = CHAT, window: Any = "24h", **more: Any) -> Any:
        file = self.upload(*lines)
        return self.api.batches.create(
            input_file_id=file, endpoint=endpoint, completion_window=window, **more
        )

    def ended(self, batch: Any) -> Any:
        """The batch once it has ended."""

        def is_over() -> bool:
            status = self.api.batches.retrieve(batch.id).status
            return status in ("completed", "failed", "expired", "cancelled")

        wait_for(is_over)
        return self.api.batches.retrieve(batch.id)

    def rows(self, file_id: str | None) -> dict[str, Any]:
        assert file_id is not None
        text = self.api.files.content(file_id).read().decode()
        rows = [json.loads(line) for line in text.splitlines()]
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["custom_id"]: row for row in rows}


def answered(client: Batcher, batch: Any) -> int:
    """How many requests of a batch have an answer."""
    counts = client.api.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return counts.completed


def line(custom_id: Any, text: str = "hi", url: Any = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **fields.pop("body", {})}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | fields


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


def test_a_batch_from_its_file_to_its_answers(client: Batcher, server: RunningServer) -> None:
    bad = line("bad", body={"temperature": -1})
    batch = client.start(
        line("one"), "", line("two", "other"), bad, line("three"), metadata={"run": "1"}
    )
    assert batch.status == "validating" and batch.metadata == {"run": "1"}
    assert batch.expires_at == batch.created_at + 86_400
    batch = client.ended(batch)
    assert batch.status == "completed" and batch.errors is None and batch.model == "test-model"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.usage.input_tokens > 0 and batch.usage.input_tokens_details.cached_tokens == 9
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    answers = client.rows(batch.output_file_id)
    assert answers.keys() == {"one", "two", "three"}
    for name, number in (("one", 1), ("two", 3), ("three", 5)):
        row = answers[name]
        assert row.keys() == {"id", "custom_id", "response", "error"} and row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["request_id"] == f"{batch.id}-{number}"
        message = row["response"]["body"]["choices"][0]["message"]
        assert message["content"] == "Hello, world!"
    (error,) = client.rows(batch.error_file_id).values()
    assert error["custom_id"] == "bad" and error["response"]["status_code"] == 400
    assert "temperature" in error["response"]["body"]["error"]["message"]
    file = client.api.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output" and file.filename == f"{batch.id}_output.jsonl"
    wait_for(lambda: server.service.admission.memory.held == 0)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}}),
    ],
)
def test_every_route_that_answers_prompts(client: Batcher, endpoint: str, body: Any) -> None:
    row = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    batch = client.ended(client.start(row, endpoint=endpoint))
    assert batch.status == "completed", batch.errors
    assert batch.request_counts.completed == 1, client.rows(batch.error_file_id)
    answer = client.rows(batch.output_file_id)["a"]["response"]["body"]
    assert "Hello" in json.dumps(answer) or endpoint == "/inference/v1/generate"


def test_a_file_with_bad_lines_is_refused_with_their_numbers(client: Batcher) -> None:
    bad: list[tuple[Any, str | None, str | None]] = [
        ("{", "invalid_json", None),
        ("[1]", "invalid_json", None),
        ("[" * 100, "invalid_json", None),
        ('{"custom_id": "\ud800"}', "invalid_json", None),
        (line(5), "invalid_request", "custom_id"),
        (line("x" * 513), "invalid_request", "custom_id"),
        (line("a", method="GET"), "invalid_request", "method"),
        (line("b", url="/v1/completions"), "mismatched_endpoint", "url"),
        (line("c", url="http://host" + CHAT), "invalid_request", "url"),
        (line("d", body={"stream": True}), "invalid_request", "stream"),
        ({**line("e"), "body": None}, "invalid_request", "body"),
        (line("good"), "duplicate_custom_id", "custom_id"),
    ]
    batch = client.ended(client.start(line("good"), *[each for each, _, _ in bad]))
    assert batch.status == "failed" and batch.failed_at
    assert batch.output_file_id is None and batch.error_file_id is None
    assert batch.request_counts.total == 0
    found = [(each.line, each.code, each.param) for each in batch.errors.data]
    assert found == [(number, code, param) for number, (_, code, param) in enumerate(bad, start=2)]
    assert all(each.message for each in batch.errors.data)


@pytest.mark.parametrize(
    ("lines", "code"),
    [([], "empty_file"), (["", "  "], "empty_file"), (["x"] * 99, "invalid_json")],
)
def test_empty_and_wholly_bad_files(client: Batcher, lines: list[str], code: str) -> None:
    batch = client.ended(client.start(*lines))
    assert batch.status == "failed" and 1 <= len(batch.errors.data) <= 50
    assert {each.code for each in batch.errors.data} == {code}


def test_too_many_lines_are_refused(client: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_serve.batch.plan.MAX_LINES", 3)
    assert client.ended(client.start(*map(line, "abc"))).status == "completed"
    batch = client.ended(client.start(*map(line, "abcd")))
    assert batch.status == "failed" and batch.errors.data[0].code == "too_many_requests"


@pytest.mark.parametrize("bytes_of_it", [(2 << 20) + 1, 3 << 20])
def test_a_line_that_is_too_long(tokenizer: Tokenizer, bytes_of_it: int) -> None:
    config = ServerConfig(port=0, batch_store="16MiB", max_body_size=2 << 20)
    with running(FakeEngine(tokenizer), config) as server:
        client = Batcher(server)
        long = line("a", "")
        long = line("a", "x" * (bytes_of_it - len(json.dumps(long))))
        assert len(json.dumps(long)) == bytes_of_it
        batch = client.ended(client.start(line("b"), long, "{"))
        assert [(each.line, each.code) for each in batch.errors.data] == [
            (2, "body_too_large"),
            (3, "invalid_json"),
        ]
        wait_for(lambda: server.service.admission.memory.held == 0)
        client.api.close()


def test_lines_as_long_as_a_body_may_be(server: RunningServer, client: Batcher) -> None:
    server.engine.max_model_len = 1 << 22
    long = [line(name, name * (1 << 20)) for name in "ab"]
    batch = client.ended(client.start(*long, line("c")))
    assert batch.request_counts.total == 3 and batch.status == "completed"
    wait_for(lambda: server.service.admission.memory.held == 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-0"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": "/v1/cache/flush"}, "endpoint"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "9999999999h"}, "completion_window"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"wrong": 1}, "wrong"),
    ],
)
def test_bad_requests_for_batches(
    client: Batcher, server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    file = client.upload(line("a"))
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    answer = server.post("/v1/batches", body | fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param and answer.json()["error"]["message"]
    assert list(client.api.batches.list()) == []


def test_results_are_no_input(client: Batcher) -> None:
    batch = client.ended(client.start(line("a")))
    with pytest.raises(openai.BadRequestError, match="purpose is batch_output"):
        client.api.batches.create(
            input_file_id=batch.output_file_id, endpoint=CHAT, completion_window="24h"
        )


def test_batches_have_pages_and_unknown_ids_are_told(client: Batcher) -> None:
    ids = [client.ended(client.start(line("a"))).id for _ in range(3)]
    assert [each.id for each in client.api.batches.list(limit=2)] == ids[::-1]
    page = client.api.batches.list(after=ids[2], limit=1)
    assert [each.id for each in page.data] == [ids[1]] and page.has_more
    for call in (client.api.batches.retrieve, client.api.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no batch"):
            call("batch_0")
    with pytest.raises(openai.BadRequestError, match="has ended with the status completed"):
        client.api.batches.cancel(ids[0])


def stalled(server: RunningServer, client: Batcher, count: int = 8, **more: Any) -> Any:
    """A batch of which two requests are answered and the next ones hang."""
    batch = client.start(*[line(str(n), f"{n} question") for n in range(count)], **more)
    wait_for(lambda: answered(client, batch) >= 2)
    return batch


def slow(server: RunningServer) -> None:
    """Let the engine answer two requests and stall in the third."""
    tokens = len(server.engine.preprocessor.tokenizer.encode_plain(server.engine.answer))
    server.engine.gate = Gate(2 * tokens)


class Gate:
    """Lets so many tokens pass, then waits to be set."""

    def __init__(self, tokens: int) -> None:
        self.left, self.event = tokens, threading.Event()

    def wait(self, timeout: float) -> bool:
        self.left -= 1
        return self.left >= 0 or self.event.wait(timeout)

    def set(self) -> None:
        self.event.set()

    def clear(self) -> None:
        self.event.clear()


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
        assert server.service.batches is not None
        folder = Path(server.service.batches.store._folder.path)
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


def test_a_full_queue_is_waited_for(server: RunningServer, client: Batcher) -> None:
    limit = server.service.config.max_queued_requests + server.engine.config.max_num_seqs
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
