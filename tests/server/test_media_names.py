"""Media that are named instead of sent: tokens, hits and bits are those of sent ones."""

from __future__ import annotations

import base64
import gc
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from conversation import png_url
from hostile_files import data_url, image_of
from PIL import Image
from serving import RunningServer, ok, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.reading.conversation import StoredUpload
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.auth import Owner

NOISE = np.random.default_rng(7).integers(0, 256, (120, 200, 3), dtype=np.uint8)
URL = png_url(Image.fromarray(NOISE))
OTHER = data_url("image/png", image_of("PNG", 90, 120))
CHAT = "/v1/chat/completions"
ALICE, BOB = ({"Authorization": f"Bearer {name}"} for name in ("alice", "bob"))
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 16,
    "cache_memory": "64MiB",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "threads": 1,
    "speculative": "off",
}


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    engine = Engine.from_checkpoint(str(checkpoint), EngineConfig(**OPTIONS))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def _server(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("bob: bobs\n")
    config = ServerConfig(
        port=0,
        idle_check=False,
        api_key=("alice", "operator"),
        tenant_keys=str(keys),
        media_files="200KiB",
    )
    with running(engine, config) as server:
        yield server


@pytest.fixture
def server(_server: RunningServer) -> Iterator[RunningServer]:
    """Afterwards nothing may be left of the test's requests, and no invariant violated."""
    forget(_server)
    yield _server
    wait_for(lambda: _server.service.requests.num_open == 0)
    wait_for(lambda: _server.service.admission.memory.held == 0)
    _server.engine.check()


def forget(server: RunningServer) -> None:
    flushed = server.post("/v1/cache/flush", {}, headers={"x-api-key": "operator"})
    assert flushed.status_code == 200


def image(url: str | None, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": None if url is None else {"url": url}, **fields}


def body_of(*turns: Any, **fields: Any) -> dict[str, Any]:
    messages = []
    for at, turn in enumerate(turns):
        role = "assistant" if at % 2 else "user"
        messages.append({"role": role, "content": turn})
    more = {"temperature": 0, "max_tokens": 8, "cache_report": True, "logprobs": True}
    return {"messages": messages, **more, "return_token_ids": True, **fields}


def ask(server: RunningServer, body: dict[str, Any], key: Any = ALICE) -> dict[str, Any]:
    answer = ok(server.post(CHAT, body, headers=key))
    for name in ("id", "created"):
        del answer[name]
    return answer


def two_turns(server: RunningServer, first: Any, second: Any) -> tuple[Any, Any, int]:
    """The answers of a conversation, the second one's picture as given, and its bytes."""
    question = {"type": "text", "text": "What is this?"}
    one = ask(server, body_of([first, question]))
    said = one["choices"][0]["message"]["content"]
    named = second if not callable(second) else second(one)
    body = body_of([named, question], said, "And where?")
    return one, ask(server, body), len(json.dumps(body))


def by_hash(answer: dict[str, Any]) -> dict[str, Any]:
    (medium,) = answer["cache_report"]["media"]
    return image(f"hash:{medium['item_hash']}")


@pytest.mark.parametrize(
    ("first", "second"),
    [(image(URL, uuid="p1"), image(None, uuid="p1")), (image(URL), by_hash)],
    ids=["uuid", "hash"],
)
def test_a_second_turn_by_name_is_that_of_the_picture(
    server: RunningServer, first: Any, second: Any
) -> None:
    *sent, many = two_turns(server, image(URL), image(URL))
    forget(server)
    *named, few = two_turns(server, first, second)
    assert named == sent
    assert sent[1]["cache_report"]["boundary"] > 0 and sent[1]["prompt_token_ids"]
    assert few <= 1000 < many


def test_all_apis_take_the_names(server: RunningServer) -> None:
    seen = ask(server, body_of([image(URL, uuid="p1"), {"type": "text", "text": "What?"}]))
    digest = seen["cache_report"]["media"][0]["item_hash"]
    count = seen["usage"]["prompt_tokens"]
    part = {"type": "input_image", "image_url": f"hash:{digest}"}
    question = {"type": "input_text", "text": "What?"}
    given = {"input": [{"role": "user", "content": [part, question]}], "max_output_tokens": 4}
    response = ok(server.post("/v1/responses", given, headers=ALICE))
    assert response["usage"]["input_tokens"] == count
    # Its stored input names the picture too.
    more = {"input": "And?", "previous_response_id": response["id"], "max_output_tokens": 4}
    assert ok(server.post("/v1/responses", more, headers=ALICE))["usage"]["input_tokens"] > count
    block = {"type": "image", "source": {"type": "url", "url": f"hash:{digest}"}}
    asked = {"role": "user", "content": [block, {"type": "text", "text": "What?"}]}
    message = {"model": "test-model", "max_tokens": 4, "messages": [asked]}
    usage = ok(server.post("/v1/messages", message, headers=ALICE))["usage"]
    assert (
        usage["input_tokens"]
        + usage["cache_read_input_tokens"]
        + usage["cache_creation_input_tokens"]
        == count
    )
    messages = body_of([image(None, uuid="p1"), {"type": "text", "text": "What?"}])["messages"]
    report = ok(server.post("/v1/cache/probe", {"messages": messages}, headers=ALICE))
    assert report["prompt_tokens"] == count and report["media"][0]["item_hash"] == digest
    pinned = server.post("/v1/cache/pin", {"messages": messages, "ttl_seconds": 9}, headers=ALICE)
    assert ok(pinned)["pinned_tokens"] > 0
    assert len(ok(server.post("/tokenize", {"messages": messages}, headers=ALICE))["tokens"]) == (
        count
    )
    forget(server)
    for path, body in (("/v1/responses", more | given), ("/v1/messages", message)):
        refused = server.post(
            path, {k: v for k, v in body.items() if k[:3] != "pre"}, headers=ALICE
        )
        assert refused.status_code == 409, refused.text


def test_a_base64_block_becomes_a_name_as_well(server: RunningServer) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}

    def asked(source: dict[str, Any]) -> dict[str, Any]:
        content = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
        message = {"role": "user", "content": content}
        body = {"model": "test-model", "max_tokens": 4, "messages": [message], "temperature": 0}
        return ok(server.post("/v1/messages", body | {"cache_report": True}, headers=ALICE))

    first = asked(source)
    digest = first["cache_report"]["media"][0]["item_hash"]
    again = asked({"type": "url", "url": f"hash:{digest}"})
    assert again["content"][0]["thinking"] == first["content"][0]["thinking"]
    assert again["cache_report"]["media"][0]["item_hash"] == digest


def refusal(server: RunningServer, part: Any, key: Any, **fields: Any) -> tuple[int, Any]:
    answer = server.post(CHAT, body_of([part], **fields), headers=key)
    return answer.status_code, answer.json()["error"]


def test_names_of_other_keys_and_salts_are_unknown_ones(server: RunningServer) -> None:
    alices = ask(server, body_of([image(URL, uuid="p1"), {"type": "text", "text": "?"}]))
    digest = alices["cache_report"]["media"][0]["item_hash"]
    unknown = "0" * 32
    for key, fields in ((BOB, {}), (ALICE, {"cache_salt": "other"})):
        for mine, nobodys in (
            (image(None, uuid="p1"), image(None, uuid="q1")),
            (image(f"hash:{digest}"), image(f"hash:{unknown}")),
        ):
            status, error = refusal(server, mine, key, **fields)
            assert status == 409 and error["code"] == "media_not_held"
            text = json.dumps([status, error]).replace("p1", "q1").replace(digest, unknown)
            assert json.loads(text) == list(refusal(server, nobodys, key, **fields))
    # One key's name never replaces another's.
    bobs = ask(server, body_of([image(OTHER, uuid="p1")]), BOB)
    again = ask(server, body_of([image(None, uuid="p1")]), BOB)
    assert again["prompt_token_ids"] == bobs["prompt_token_ids"]
    mine = ask(server, body_of([image(None, uuid="p1"), {"type": "text", "text": "?"}]))
    assert mine["prompt_token_ids"] == alices["prompt_token_ids"]


def test_a_stream_is_refused_before_it_begins(server: RunningServer) -> None:
    status, error = refusal(server, image(None, uuid="gone"), ALICE, stream=True)
    assert status == 409 and error["param"] == "messages[0].content[0].uuid"


def test_what_the_cache_has_lost_is_made_from_the_held_bytes(server: RunningServer) -> None:
    """Eviction takes KV, embeddings and records of uploads; names stay."""
    first = ask(server, body_of([image(URL, uuid="p1")]))
    server.engine.flush()
    again = ask(server, body_of([image(None, uuid="p1")]))
    assert again["cache_report"]["media_encoded"] == 1
    assert again == first


def test_preempted_requests_see_their_picture_again(checkpoint: Path) -> None:
    """The names are dropped while the requests run: what these use stays."""
    config = EngineConfig(**OPTIONS | {"cache_memory": "700KiB", "max_model_len": 1024})
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0, idle_check=False)) as server:

        def long(part: Any, number: int) -> dict[str, Any]:
            text = {"type": "text", "text": f"Question {number}"}
            return body_of([part, text], max_tokens=200, ignore_eos=True, cache_report=False)

        parts = [image(url, uuid=str(at)) for at, url in enumerate((URL, OTHER) * 2)]
        alone = [ask(server, long(part, at), {}) for at, part in enumerate(parts)]
        engine.flush()
        before = engine.stats()["num_preemptions"]
        found: dict[int, Any] = {}

        def run(number: int) -> None:
            found[number] = ask(server, long(image(None, uuid=str(number)), number), {})

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: engine.num_running + engine.num_waiting > 0 or bool(found))
        media = server.service.state.media
        assert media is not None
        wait_for(lambda: server.service.requests.num_open == 4 or bool(found))
        media.clear()
        for thread in threads:
            thread.join()
        assert engine.stats()["num_preemptions"] > before
        for number, each in enumerate(alone):
            assert found[number]["choices"] == each["choices"]
        ask(server, body_of("The engine keeps the last prompt until the next one."), {})
        wait_for(lambda: gc.collect() >= 0 and media.num_bytes == 0)
        engine.check()


def test_options_apply_to_a_named_picture(server: RunningServer) -> None:
    ask(server, body_of([image(URL, uuid="p1")]))
    small = ask(server, body_of([image(None, uuid="p1", max_pixels=64 * 64)]))
    sent = ask(server, body_of([image(URL, max_pixels=64 * 64)]))
    assert small["prompt_token_ids"] == sent["prompt_token_ids"]
    report = small["cache_report"]["media"][0]
    assert report["width"] * report["height"] <= 64 * 64


def test_lists_of_frames_have_names_too(server: RunningServer) -> None:
    frames = [data_url("image/png", image_of("PNG", 64, 64)) for _ in range(4)]
    sent = {"type": "video_url", "video_url": {"url": frames}, "uuid": "v"}
    first = ask(server, body_of([sent]))
    second = ask(server, body_of([{"type": "video_url", "video_url": None, "uuid": "v"}]))
    assert second["prompt_token_ids"] == first["prompt_token_ids"]
    digest = first["cache_report"]["media"][0]["item_hash"]
    named = {"type": "video_url", "video_url": f"hash:{digest}"}
    assert ask(server, body_of([named]))["prompt_token_ids"] == first["prompt_token_ids"]


def upload(
    server: RunningServer, name: str = "a.png", key: Any = ALICE, **fields: Any
) -> httpx.Response:
    data = base64.b64decode(URL.partition(",")[2])
    form: dict[str, Any] = {"data": {"purpose": "vision"}, "files": {"file": (name, data)}}
    return server.client.post("/v1/files", headers=key, **form | fields)


def file_parts(file_id: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests of all APIs with a file's picture."""
    text = {"type": "text", "text": "?"}
    response = {"type": "input_text", "text": "?"}
    block = {"type": "image", "source": {"type": "file", "file_id": file_id}}
    found: list[tuple[str, dict[str, Any]]] = [
        (CHAT, body_of([{"type": "file", "file": {"file_id": file_id}}, text]))
    ]
    for part in (
        {"type": "input_image", "image_url": None, "file_id": file_id},
        {"type": "input_file", "file_id": file_id},
    ):
        found.append(("/v1/responses", {"input": [{"role": "user", "content": [part, response]}]}))
    message = {"role": "user", "content": [block, text]}
    found.append(("/v1/messages", {"model": "test-model", "max_tokens": 4, "messages": [message]}))
    return found


def test_files_are_seen_by_their_key_alone(server: RunningServer) -> None:
    text = {"type": "text", "text": "?"}
    sent = ask(server, body_of([image(URL), text]))
    forget(server)
    file = ok(upload(server))
    assert file["purpose"] == "vision" and file["id"].startswith("file-img-")
    part = {"type": "file", "file": {"file_id": file["id"]}}
    named = ask(server, body_of([part, text]))
    assert named == sent
    body = body_of([part, text], cache_salt="mine", max_tokens=1)
    assert len(json.dumps(body)) < 1000
    ask(server, body)
    for path, asked in file_parts(file["id"]):
        asked = asked if path == CHAT else asked | {"cache_report": True}
        report = ok(server.post(path, asked, headers=ALICE))["cache_report"]
        assert report["media"][0]["item_hash"] == sent["cache_report"]["media"][0]["item_hash"]
        wrong = dict(file_parts("file-img-" + "0" * 32))[path]
        foreign = server.post(path, asked, headers=BOB)
        assert foreign.status_code == 404
        unknown = server.post(path, wrong, headers=BOB)
        if path == CHAT:
            assert foreign.text.replace(file["id"], "") == unknown.text.replace(
                "file-img-" + "0" * 32, ""
            )
            assert foreign.json()["error"]["code"] == "file_not_found"
    assert ok(server.client.get("/v1/files", headers=ALICE))["data"] == [file]
    assert ok(server.client.get("/v1/files", headers=BOB))["data"] == []
    one = f"/v1/files/{file['id']}"
    assert server.client.delete(one, headers=BOB).status_code == 404
    assert ok(server.client.delete(one, headers=ALICE))["deleted"]
    assert server.post(CHAT, body, headers=ALICE).status_code == 404


def test_a_file_deleted_between_look_up_and_use_is_not_held(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ok(upload(server))["id"]
    state = server.service.state
    find = state.stored_media
    assert find is not None

    def deleting(owner: Owner, file_id: str) -> StoredUpload | None:
        found = find(owner, file_id)
        assert found is not None
        found.path.unlink()
        return found

    monkeypatch.setattr(state, "stored_media", deleting)
    body = body_of([{"type": "file", "file": {"file_id": file}}], stream=True)
    answer = server.post(CHAT, body, headers=ALICE)
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "media_not_held"
    ok(server.client.delete(f"/v1/files/{file}", headers=ALICE))


def test_files_of_media_have_a_quota_and_a_kind(server: RunningServer) -> None:
    for name, said in (("a.jsonl", "must end as"), ("noname", "must end as")):
        refused = upload(server, name)
        assert refused.status_code == 400 and said in refused.text
    late = [("file", ("a.png", b"x")), ("purpose", (None, b"vision"))]
    refused = upload(server, data={}, files=late)
    assert refused.status_code == 400 and "purpose must come before file" in refused.text
    refused = upload(server, files={"file": ("a.png", b"x" * 210_000)})
    assert refused.status_code == 413 and refused.json()["error"]["code"] == "media_files_full"
    refused = upload(server, data={"purpose": "batch"})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "no_batch_store"
    ids = [ok(upload(server, name))["id"] for name in ("a.mp4", "a.pdf")]
    assert [each[:9] for each in ids] == ["file-vid-", "file-pdf-"]
    for file_id, asked in ((ids[0], "video"), (ids[1], "document")):
        part = {"type": "input_image", "file_id": file_id}
        refused = server.post(CHAT, body_of([part]), headers=ALICE)
        assert refused.status_code == 400 and f"of the kind {asked}, not image" in refused.text
        ok(server.client.delete(f"/v1/files/{file_id}", headers=ALICE))
    assert server.client.get("/v1/files", headers=ALICE).json()["data"] == []


def test_pages_of_a_stored_document_are_pictures(server: RunningServer) -> None:
    pytest.importorskip("pypdfium2")
    file = io.BytesIO()
    Image.new("RGB", (60, 80), "red").save(file, "PDF")
    stored = ok(upload(server, files={"file": ("a.pdf", file.getvalue())}))["id"]
    data = base64.b64encode(file.getvalue()).decode()
    text = {"type": "text", "text": "?"}
    sent = {"type": "file", "file": {"filename": "a.pdf", "file_data": data}}
    found = ask(server, body_of([{"type": "file", "file": {"file_id": stored}}, text]))
    page = ask(server, body_of([sent, text]))["cache_report"]["media"]
    assert [each["item_hash"] for each in found["cache_report"]["media"]] == [page[0]["item_hash"]]
    ok(server.client.delete(f"/v1/files/{stored}", headers=ALICE))
