"""Pins over HTTP: seen, lifted and freed by their owners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, chat_body, ok, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

TEXT = "This text is long enough for two blocks, and it shall stay where it is for a while."
OPERATOR, FIRST, SECOND = "operator", "first-key", "second-key"
PATH = "/v1/cache/pins"


def pin(server: RunningServer, text: str = TEXT, **fields: Any) -> dict[str, Any]:
    ok(server.chat(text, max_tokens=1))
    return ok(server.post("/v1/cache/pin", chat_body(text, ttl_seconds=60, **fields)))


def listed(server: RunningServer, **query: int) -> dict[str, Any]:
    return ok(server.client.get(PATH, params=query))


def test_pins_are_listed_the_next_to_expire_first(server: RunningServer) -> None:
    ok(server.post("/v1/cache/flush", {}))
    late = pin(server)
    soon = ok(server.post("/v1/cache/pin", {"key": first_block(server), "ttl_seconds": 9}))
    page = listed(server)
    assert (page["object"], page["total"]) == ("cache.pins", 2)
    assert [each["key"] for each in page["pins"]] == [soon["key"], late["key"]]
    first, second = page["pins"]
    assert (first["tokens"], first["blocks"]) == (16, 1)
    assert (second["tokens"], second["state"]) == (late["pinned_tokens"], True)
    assert 0 < first["expires_in_seconds"] <= 9 < second["expires_in_seconds"] <= 60
    rest = listed(server, offset=1, limit=1)
    assert rest["total"] == 2 and [each["key"] for each in rest["pins"]] == [late["key"]]


def first_block(server: RunningServer) -> str:
    nodes = ok(server.client.get("/v1/cache/tree"))["nodes"]
    return str(next(each["key"] for each in nodes if each["start"] == 0 and not each["tail"]))


def test_a_lifted_pin_holds_nothing_any_more(server: RunningServer) -> None:
    ok(server.post("/v1/cache/flush", {}))
    key = pin(server)["key"]
    other = pin(server, "Another text, which is as long as that one and stays pinned, too.")["key"]
    assert ok(server.client.delete(f"{PATH}/{key}"))["lifted"] == 1
    assert [each["key"] for each in listed(server)["pins"]] == [other]
    again = server.client.delete(f"{PATH}/{key}")
    assert again.status_code == 404 and again.json()["error"]["code"] == "pin_not_found"
    assert ok(server.client.delete(PATH))["lifted"] == 1
    nodes = ok(server.client.get("/v1/cache/tree"))["nodes"]
    assert nodes and not any(each["pins"] for each in nodes), "they are cached as before"
    assert ok(server.client.delete(PATH))["lifted"] == 0


def test_nothing_pinned_has_no_key(server: RunningServer) -> None:
    body = chat_body("Nobody has said this before.", ttl_seconds=60)
    answer = ok(server.post("/v1/cache/pin", body))
    assert (answer["pinned_tokens"], answer["key"]) == (0, None)


def test_the_longest_time_is_a_plain_number(server: RunningServer) -> None:
    answer = server.post("/v1/cache/pin", chat_body(TEXT, ttl_seconds=31 * 86400))
    assert answer.status_code == 400
    assert "at most 2592000, got" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", f"{PATH}?limit=0", 400, "limit"),
        ("GET", f"{PATH}?limit=1001", 400, "limit"),
        ("GET", f"{PATH}?offset=x", 400, "offset"),
        ("GET", f"{PATH}?other=1", 400, "other"),
        ("DELETE", f"{PATH}?key=1", 400, "key"),
        ("DELETE", f"{PATH}/{'0' * 64}", 404, "key"),
        ("DELETE", f"{PATH}/{'0' * 63}", 404, "key"),
        ("DELETE", f"{PATH}/none", 404, "key"),
    ],
)
def test_bad_requests_are_refused(
    server: RunningServer, method: str, path: str, status: int, param: str
) -> None:
    answer = server.client.request(method, path)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.fixture(scope="module")
def tenants(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(f"{FIRST}: first\n{SECOND}: second\n")
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="8MiB", max_model_len=256)
    engine = Engine.from_checkpoint(str(checkpoint), config)
    try:
        with running(engine, ServerConfig(api_key=(OPERATOR,), tenant_keys=str(keys))) as server:
            yield server
    finally:
        engine.close()


def test_a_tenant_sees_and_lifts_its_own_alone(tenants: RunningServer) -> None:
    def call(key: str, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return tenants.client.request(method, path, headers=headers, json=body)

    def keys_of(key: str) -> list[str]:
        return [each["key"] for each in ok(call(key, "GET", PATH))["pins"]]

    pinned = {}
    for key in (FIRST, SECOND):
        ok(call(key, "POST", "/v1/chat/completions", chat_body(TEXT, max_tokens=1)))
        body = chat_body(TEXT, ttl_seconds=60)
        pinned[key] = ok(call(key, "POST", "/v1/cache/pin", body))["key"]
    assert pinned[FIRST] != pinned[SECOND]
    assert (keys_of(FIRST), keys_of(SECOND)) == ([pinned[FIRST]], [pinned[SECOND]])
    assert sorted(keys_of(OPERATOR)) == sorted(pinned.values())
    for path in (f"{PATH}/{pinned[SECOND]}", f"{PATH}/{'0' * 64}"):
        refused = call(FIRST, "DELETE", path)
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "pin_not_found"
    assert ok(call(FIRST, "DELETE", PATH))["lifted"] == 1
    assert (keys_of(FIRST), keys_of(SECOND)) == ([], [pinned[SECOND]])
    assert ok(call(OPERATOR, "DELETE", f"{PATH}/{pinned[SECOND]}"))["lifted"] == 1
    assert call("unknown", "GET", PATH).status_code == 401


@pytest.mark.parametrize(("path", "more"), [("probe", {}), ("pin", {"ttl_seconds": 9})])
def test_the_cache_s_routes_name_what_they_ignore(
    server: RunningServer, path: str, more: dict[str, Any]
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "other", "content": "x"},
    ]
    answer = server.post(f"/v1/cache/{path}", {"messages": messages} | more)
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-vlm-serve-ignored-fields"].split(", ")
    assert named == ["messages[2].tool_call_id"]
    answer = server.post(f"/v1/cache/{path}", {"prompt": "Hi"} | more)
    assert "x-vlm-serve-ignored-fields" not in answer.headers
