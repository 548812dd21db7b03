"""The routes under /v1/cache, over a real engine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, chat_body, ok, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

TEXT = "What would be found of this conversation if it came a second time?"


def test_a_probe_says_what_the_request_then_reports(server: RunningServer) -> None:
    probe = ok(server.post("/v1/cache/probe", chat_body(TEXT)))
    assert (probe["boundary"], probe["reason"]) == (0, "cold")
    first = ok(server.chat(TEXT, max_tokens=2, return_token_ids=True))
    probe = ok(server.post("/v1/cache/probe", chat_body(TEXT)))
    assert probe["boundary"] > 0
    body = ok(server.chat(TEXT, max_tokens=2, cache_report=True))
    assert body["cache_report"] == probe
    ids = {"prompt": first["prompt_token_ids"]}
    assert ok(server.post("/v1/cache/probe", ids))["boundary"] == probe["boundary"]


def test_a_probe_under_another_salt_finds_nothing(server: RunningServer) -> None:
    ok(server.chat(TEXT, max_tokens=2))
    body = chat_body(TEXT, cache_salt="tenant")
    found = ok(server.post("/v1/cache/probe", body))
    assert (found["boundary"], found["reason"]) == (0, "salt")


def test_pin_tree_flush_and_stats(server: RunningServer) -> None:
    ok(server.chat(TEXT, max_tokens=2))
    pinned = ok(server.post("/v1/cache/pin", chat_body(TEXT, ttl_seconds=60)))
    assert 0 < pinned["pinned_tokens"] < pinned["prompt_tokens"]
    tree = ok(server.client.get("/v1/cache/tree"))
    assert tree["total"] == len(tree["nodes"])
    assert max(node["end"] for node in tree["nodes"] if node["pins"]) == pinned["pinned_tokens"]
    page = ok(server.client.get("/v1/cache/tree", params={"offset": 1, "limit": 1}))
    assert page["nodes"] == tree["nodes"][1:2]
    stats = ok(server.client.get("/v1/cache/stats"))
    assert stats["usage"]["nodes"] == tree["total"]
    assert stats["cache"]["requests"] > 0
    ok(server.post("/v1/cache/flush", {}))
    assert ok(server.client.get("/v1/cache/tree"))["total"] == 0


def test_a_node_is_found_and_pinned_by_its_key(server: RunningServer) -> None:
    made = ok(server.chat(TEXT, max_tokens=2, return_token_ids=True))
    nodes = ok(server.client.get("/v1/cache/tree"))["nodes"]
    second = next(node for node in nodes if node["start"] == 16 and not node["tail"])
    found = ok(server.client.get(f"/v1/cache/nodes/{second['key']}"))
    assert found.pop("token_ids") == made["prompt_token_ids"][16:32]
    assert found == second
    pinned = ok(server.post("/v1/cache/pin", {"key": second["key"], "ttl_seconds": 60}))
    key = second["key"]
    assert pinned == {"object": "cache.pin", "prompt_tokens": 32, "pinned_tokens": 32, "key": key}
    after = ok(server.client.get("/v1/cache/tree"))["nodes"]
    assert sorted(node["end"] for node in after if node["pins"]) == [16, 32]
    ok(server.post("/v1/cache/pin", {"key": second["key"], "ttl_seconds": 0.001, "model": None}))
    wait_for(lambda: not any(n["pins"] for n in ok(server.client.get("/v1/cache/tree"))["nodes"]))


def test_unknown_keys_are_not_found(server: RunningServer) -> None:
    ok(server.chat(TEXT, max_tokens=2))
    (first, *_) = ok(server.client.get("/v1/cache/tree"))["nodes"]
    server.engine.flush()
    for key in (first["key"], "0" * 64):
        answer = server.post("/v1/cache/pin", {"key": key, "ttl_seconds": 60})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "node_not_found")
    for key in (first["key"], "0" * 64, "x", "0" * 63, first["key"][:32], "%00"):
        answer = server.client.get(f"/v1/cache/nodes/{key}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "node_not_found")


def test_the_tree_is_read_while_the_engine_is_busy(server: RunningServer) -> None:
    if server.engine.pid is not None:
        pytest.skip("an engine in another process cannot be kept busy from here")
    ok(server.chat(TEXT, max_tokens=2))
    before = ok(server.client.get("/v1/cache/tree"))
    entered, let_go = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert let_go.wait(30)

    thread = threading.Thread(target=server.engine.call, args=(work,))
    thread.start()
    try:
        assert entered.wait(30)
        assert ok(server.client.get("/v1/cache/tree")) == before
        key = before["nodes"][0]["key"]
        assert ok(server.client.get(f"/v1/cache/nodes/{key}"))["key"] == key
    finally:
        let_go.set()
        thread.join()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("pin", {"key": "0" * 63, "ttl_seconds": 1}, "key"),
        ("pin", {"key": "A" * 64, "ttl_seconds": 1}, "key"),
        ("pin", {"key": "0" * 64, "prompt": "both", "ttl_seconds": 1}, "key"),
        ("pin", {"key": "0" * 64}, "ttl_seconds"),
        ("probe", chat_body(TEXT, max_tokens=3), "max_tokens"),
        ("probe", {}, "prompt"),
        ("probe", {"prompt": ""}, "prompt"),
        ("probe", {"prompt": []}, "prompt"),
        ("probe", chat_body(TEXT, prompt="both"), "prompt"),
        ("probe", chat_body(TEXT, cache_salt="so odd?"), "cache_salt"),
        ("probe", chat_body(TEXT, cache_salt="x" * 129), "cache_salt"),
        ("pin", chat_body(TEXT), "ttl_seconds"),
        ("pin", chat_body(TEXT, ttl_seconds="60"), "ttl_seconds"),
        ("pin", chat_body(TEXT, ttl_seconds=-1), "ttl_seconds"),
        ("pin", chat_body(TEXT, ttl_seconds=1e30), "ttl_seconds"),
        ("flush", {"everything": True}, "everything"),
    ],
)
def test_bad_bodies_are_refused_by_name(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.post(f"/v1/cache/{path}", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("query", ["offset=-1", "limit=0", "limit=1001", "limit=x", "page=2"])
def test_bad_pages_are_refused(server: RunningServer, query: str) -> None:
    response = server.client.get(f"/v1/cache/tree?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.split("=")[0]


def test_another_model_is_not_found(server: RunningServer) -> None:
    assert server.post("/v1/cache/probe", chat_body(TEXT, model="other")).status_code == 404


def test_every_route_needs_the_key(checkpoint: Path) -> None:
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="8MiB", max_model_len=256)
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0, api_key=("secret",))) as server:
        for path in ("probe", "pin", "flush"):
            assert server.post(f"/v1/cache/{path}", {}).status_code == 401
        for path in ("events", "nodes/" + "0" * 64):
            assert server.client.get(f"/v1/cache/{path}").status_code == 401
        for path in ("stats", "tree"):
            assert server.client.get(f"/v1/cache/{path}").status_code == 401
            key = {"authorization": "Bearer secret"}
            assert server.client.get(f"/v1/cache/{path}", headers=key).status_code == 200
