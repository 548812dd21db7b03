"""Batches over HTTP with the demo model: the answers and the reuse of `run-batch`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_forms import FORMS
from serving import RunningServer, running, wait_for

from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

EXAMPLE = Path(__file__).parents[3] / "examples" / "batch" / "pictures.jsonl"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module", params=FORMS)
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    config = EngineConfig(cache_memory="64MiB", max_num_seqs=2)
    engine = request.param("demo", config)
    with running(engine, ServerConfig(port=0, idle_check=False, batch_store="8MiB")) as server:
        yield server


def start(server: RunningServer, content: bytes) -> str:
    form = {"purpose": "batch"}
    file = server.client.post("/v1/files", data=form, files={"file": ("in.jsonl", content)})
    body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    answer = server.post("/v1/batches", body)
    assert answer.status_code == 200, answer.text
    name: str = answer.json()["id"]
    return name


def state(server: RunningServer, batch: str) -> Any:
    return server.client.get(f"/v1/batches/{batch}").json()


def rows(server: RunningServer, file: str) -> dict[str, Any]:
    text = server.client.get(f"/v1/files/{file}/content").text
    return {row["custom_id"]: row for row in map(json.loads, text.splitlines())}


def test_the_shipped_example_is_answered_as_by_run_batch(server: RunningServer) -> None:
    server.engine.flush()
    lines = [json.loads(line) for line in EXAMPLE.read_text().splitlines()]
    batch = start(server, EXAMPLE.read_bytes())
    wait_for(lambda: state(server, batch)["status"] in ("completed", "failed"))
    found = state(server, batch)
    assert found["status"] == "completed", found["errors"]
    assert found["request_counts"] == {"total": len(lines), "completed": len(lines), "failed": 0}
    assert found["error_file_id"] is None
    answers = rows(server, found["output_file_id"])
    bodies = [answers[line["custom_id"]]["response"]["body"] for line in lines]
    assert [body["choices"][0]["message"]["content"] for body in bodies[:6]] == [
        "Three.",
        "A red star in the middle.",
        "A yellow heart in the middle.",
        "The star is red.",
        "The star is red.",
        "The heart is yellow.",
    ]
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies[:6]]
    assert all(cached[n] + cached[n + 3] > 0 for n in range(3)), "each picture is found again"
    usage = found["usage"]
    assert usage["input_tokens"] == sum(body["usage"]["prompt_tokens"] for body in bodies)
    assert usage["output_tokens"] == sum(body["usage"]["completion_tokens"] for body in bodies)
    for line, body in zip(lines, bodies, strict=True):
        alone = server.post(CHAT, line["body"]).json()
        assert alone["choices"][0]["message"] == body["choices"][0]["message"]
    server.engine.check()


def test_a_request_overtakes_a_batch_and_a_cancelled_batch_frees_all(
    server: RunningServer,
) -> None:
    long = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": CHAT,
            "body": {"messages": [{"role": "user", "content": f"{n} stars"}], **long},
        }
        for n in range(40)
    ]
    batch = start(server, "\n".join(map(json.dumps, lines)).encode())
    wait_for(lambda: server.engine.num_running > 0)
    assert server.chat("hi", max_tokens=4).status_code == 200
    assert state(server, batch)["request_counts"]["completed"] < 39
    assert server.client.post(f"/v1/batches/{batch}/cancel").json()["status"] == "cancelling"
    wait_for(lambda: state(server, batch)["status"] == "cancelled")
    wait_for(lambda: server.engine.num_running + server.engine.num_waiting == 0)
    wait_for(lambda: server.service.admission.memory.held == 0)
    assert server.service.admission.open_tokens == 0
    found = state(server, batch)
    kept = rows(server, found["output_file_id"]) if found["output_file_id"] else {}
    assert len(kept) == found["request_counts"]["completed"]
    server.engine.check()
