"""Files and batches behind a gateway with one replica, driven by openai-python."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from batch_client import Batcher, line
from hostile_files import data_url, image_of
from process_tree import opened_by, processes_below, runs
from server_process import ServerProcess, server_process
from waiting import wait_for

from vlm_serve.deploy.cluster import PREFIX

pytestmark = pytest.mark.ray

if TYPE_CHECKING:
    import openai

SECONDS = 120.0
SMALL = ("--device", "cpu", "--cache-memory", "32MiB", "--max-model-len", "2048", "--threads", "1")


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai
    import openai


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    keys, log = folder / "keys.yaml", folder / "log"
    keys.write_text("first-key: first\n")
    with (
        log.open("w") as file,
        server_process(
            "demo", *SMALL, "--replicas", "1", "--batch-store", "8MiB", "--max-body-size", "1MiB",
            "--media-files", "1MiB",
            "--api-key", "open,other", "--tenant-keys", str(keys), "--silence-timeout", "60",
            command="deploy", log=file,
        ) as running,
    ):  # fmt: skip
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Batcher]:
    client = Batcher(server, "open")
    yield client
    client.api.close()


def test_a_batch_from_its_file_to_its_answers(client: Batcher) -> None:
    short = {"max_tokens": 8, "temperature": 0}
    lines = [line(f"r{n}", f"{n} circles", body=dict(short)) for n in range(5)]
    batch = client.ended(client.start(*lines, line("bad", body={"temperature": -1})))
    assert batch.status == "completed", batch.errors
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
    answers, errors = client.rows(batch.output_file_id), client.rows(batch.error_file_id)
    assert answers.keys() == {f"r{n}" for n in range(5)} and errors.keys() == {"bad"}
    for each in lines:
        alone = client.api.chat.completions.create(model="demo", **each["body"])
        body = answers[each["custom_id"]]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert [each.id for each in client.api.batches.list(limit=1).data] == [batch.id]
    assert client.api.files.delete(batch.output_file_id).deleted


def test_media_are_found_by_their_names(server: ServerProcess) -> None:
    data = image_of("PNG", 120, 80)
    text = {"type": "text", "text": "What is this?"}
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as client:

        def ask(part: dict[str, Any], key: str = "open") -> httpx.Response:
            body = {"messages": [{"role": "user", "content": [part, text]}], "max_tokens": 4}
            more = {"temperature": 0, "cache_report": True}
            headers = {"x-api-key": key}
            return client.post("/v1/chat/completions", json=body | more, headers=headers)

        form: dict[str, Any] = {"data": {"purpose": "vision"}, "files": {"file": ("a.png", data)}}
        stored = client.post("/v1/files", headers={"x-api-key": "open"}, **form)
        sent = {"type": "image_url", "image_url": {"url": data_url("image/png", data)}}
        first = ask(sent | {"uuid": "p"}).json()
        digest = first["cache_report"]["media"][0]["item_hash"]
        for part, refused in (
            ({"type": "image_url", "image_url": None, "uuid": "p"}, 409),
            ({"type": "image_url", "image_url": f"hash:{digest}"}, 409),
            ({"type": "file", "file": {"file_id": stored.json()["id"]}}, 404),
        ):
            assert ask(part).json()["choices"] == first["choices"]
            for key in ("other", "first-key"):
                assert ask(part, key).status_code == refused


def test_a_cancelled_batch(client: Batcher) -> None:
    long = {"max_tokens": 400, "ignore_eos": True}
    batch = client.start(*[line(str(n), f"{n} stars", body=dict(long)) for n in range(40)])
    assert client.api.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert client.ended(batch).status == "cancelled"


def test_keys_see_their_own_alone(server: ServerProcess, client: Batcher) -> None:
    batch = client.ended(client.start(line("a", body={"max_tokens": 4})))
    for key in ("other", "first-key"):
        stranger = Batcher(server, key)
        assert batch.id not in [each.id for each in stranger.api.batches.list()]
        with pytest.raises(openai.NotFoundError):
            stranger.api.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            stranger.api.files.content(batch.output_file_id)
        own = stranger.ended(stranger.start(line("b", body={"max_tokens": 4})))
        assert own.status == "completed"
        stranger.api.close()


def test_a_file_beyond_the_largest_body_is_refused_in_front(client: Batcher) -> None:
    with pytest.raises(openai.APIStatusError, match="1 MiB|1048576") as caught:
        client.api.files.create(file=("in.jsonl", b"x" * (2 << 20)), purpose="batch")
    assert caught.value.status_code == 413


def test_a_second_signal_leaves_nothing(server: ServerProcess, client: Batcher) -> None:
    """Neither processes nor Ray's folder, though a request still runs."""
    below = processes_below(server.process.pid)
    opened = map(Path, opened_by(server.process.pid))
    (folder,) = {path for path in opened if path.name.startswith(PREFIX)}
    begun = client.api.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Say it."}],
        max_tokens=1900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(begun))
    server.process.send_signal(signal.SIGTERM)
    with httpx.Client(base_url=server.url, trust_env=False) as other:
        wait_for(lambda: other.get("/ready", timeout=SECONDS).status_code == 503)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(SECONDS) == 0
    assert not folder.exists()
    assert [line for pid, line in below.items() if runs(pid)] == []
