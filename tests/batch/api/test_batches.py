"""Batches, driven by openai-python with its strictest parsing, over a scripted engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from batch_client import CHAT, Batcher, line
from serving import RunningServer, wait_for

if TYPE_CHECKING:
    import openai


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai
    import openai


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
