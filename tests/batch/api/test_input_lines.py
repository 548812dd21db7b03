"""Files that batches read: bad lines, and limits of lines and their number."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from batch_client import CHAT, Batcher, line
from fake_engine import FakeEngine
from serving import RunningServer, running, wait_for

from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

if TYPE_CHECKING:
    import openai


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai
    import openai


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
    monkeypatch.setattr("vlm_serve.batch.run.MAX_LINES", 3)
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


def test_results_are_no_input(client: Batcher) -> None:
    batch = client.ended(client.start(line("a")))
    with pytest.raises(openai.BadRequestError, match="purpose is batch_output"):
        client.api.batches.create(
            input_file_id=batch.output_file_id, endpoint=CHAT, completion_window="24h"
        )
