"""GET /v1/cache/affinity, and where its keys come from."""

from __future__ import annotations

from typing import Any

import pytest
from serving import RunningServer, chat_body, ok

from vlm_serve.preprocess.identity.affinity import affinity_keys_of_body
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.server.api.shared.request_body import AFFINITY, affinity_of, note_affinity

TEXT = "Which of all these conversations began like this one? " * 8


def held(server: RunningServer) -> dict[bytes, int]:
    told = ok(server.client.get("/v1/cache/affinity"))
    return {bytes.fromhex(entry["key"]): entry["tokens"] for entry in told["entries"]}


def keys_of(body: dict[str, Any], api: str = "chat", salt: str = "") -> tuple[bytes, ...]:
    return affinity_keys_of_body(api, body, salt=salt, model="test-model")


def test_the_digest_says_what_a_next_turn_finds(server: RunningServer) -> None:
    body = chat_body(TEXT)
    answer = ok(server.post("/v1/chat/completions", body | {"max_tokens": 4}))
    told = held(server)
    assert set(told) <= set(keys_of(body)) and told
    content = answer["choices"][0]["message"]["content"]
    later = {
        "messages": [
            *body["messages"],
            {"role": "assistant", "content": content},
            {"role": "user", "content": "And then?"},
        ]
    }
    promised = next(told[key] for key in keys_of(later) if key in told)
    found = ok(server.post("/v1/cache/probe", later))["boundary"]
    assert promised > 0 and found >= promised * 15 / 16 - 16
    ok(server.post("/v1/cache/flush", {}))
    assert held(server) == {}


@pytest.mark.parametrize(
    ("path", "api", "body"),
    [
        ("/v1/chat/completions", "chat", chat_body(TEXT)),
        ("/v1/completions", "completions", {"prompt": TEXT}),
        ("/v1/responses", "responses", {"input": TEXT}),
        ("/v1/messages", "messages", chat_body(TEXT, max_tokens=2)),
        (
            "/inference/v1/generate",
            "generate",
            {"token_ids": list(range(5, 90)), "sampling_params": {"max_tokens": 2}},
        ),
    ],
)
def test_every_api_has_its_keys_noted(
    server: RunningServer, path: str, api: str, body: dict[str, Any]
) -> None:
    limit = {"responses": "max_output_tokens", "generate": "priority"}.get(api, "max_tokens")
    ok(server.post(path, body | {limit: 2, "cache_salt": "mine"}))
    told = held(server)
    assert told and set(told) <= set(keys_of(body, api, salt="mine"))


def test_keys_that_a_front_has_set_are_taken(server: RunningServer) -> None:
    scope: Any = {"path": "/v1/chat/completions", AFFINITY: (b"x" * 16,), "state": {}}
    note_affinity(scope, read_conversation("chat", chat_body(TEXT)), "test-model")
    assert affinity_of(scope) == (b"x" * 16,)
    scope = {"path": "/v1/chat/completions", "state": {"tenant_salt": "a"}}
    note_affinity(scope, read_conversation("chat", chat_body(TEXT, cache_salt="b")), "test-model")
    assert affinity_of(scope) == keys_of(chat_body(TEXT), salt="tenant:a")
    other: Any = {"path": "/tokenize"}
    note_affinity(other, read_conversation("chat", chat_body(TEXT)), "test-model")
    assert affinity_of(other) == ()


def test_it_takes_no_query(server: RunningServer) -> None:
    response = server.client.get("/v1/cache/affinity", params={"limit": 3})
    assert response.status_code == 400
    assert "limit" in response.json()["error"]["message"]
