"""Routes with the names of vLLM and SGLang, for operators and routers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import RunningServer, running

from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

RESETS = ("/reset_prefix_cache", "/flush_cache")
OPERATOR, TENANT = ({"Authorization": f"Bearer {key}"} for key in ("operator", "tenant"))


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[RunningServer]:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenant: salt\n")
    config = EngineConfig(block_size=16, shared_store="redis://:hidden-word@127.0.0.1:1/0")
    options = ServerConfig(
        port=0, api_key=("operator",), tenant_keys=str(keys), allowed_origins=("https://ours",)
    )
    with running(FakeEngine(tokenizer, config), options) as server:
        yield server


def test_ping_needs_no_key(server: RunningServer) -> None:
    assert server.client.get("/ping").status_code == 200
    assert server.client.post("/ping").status_code == 200
    server.engine.alive = False
    assert server.client.get("/ping").status_code == 503
    server.engine.alive = True


def test_what_routers_read(server: RunningServer) -> None:
    for path in ("/get_model_info", "/model_info"):
        assert server.client.get(path).status_code == 401
        for headers in (OPERATOR, TENANT):
            body = server.client.get(path, headers=headers).json()
            assert (body["model_path"], body["is_generation"]) == ("test-model", True)
            assert body["tokenizer_path"] == "test-model" and body["has_image_understanding"]
            assert body["max_model_len"] == 4096
            assert body["max_body_bytes"] == 64 << 20
            defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": None}
            assert body["sampling_defaults"] == defaults
    models = server.client.get("/v1/models", headers=OPERATOR).json()["data"]
    assert body["model_path"] in [each["id"] for each in models]


def test_server_info_shows_no_secret(server: RunningServer) -> None:
    for path in ("/server_info", "/get_server_info"):
        answer = server.client.get(path, headers=OPERATOR)
        body = answer.json()
        assert (body["context_length"], body["tp_size"], body["dp_size"]) == (4096, 1, 1)
        assert body["engine"]["block_size"] == 16 and body["server"]["max_connections"] == 1024
        assert body["version"] and body["served_model_name"] == "test-model"
        assert body["memory"]["held_bytes"]["kv"] == 6
        assert body["weights"] == (b"w" * 32).hex()
        assert body["memory"]["resident_bytes"] > 1 << 20
        assert body["batch_invariant"]["reach"] == "none" and body["batch_invariant"]["reason"]
        for secret in ("operator", "hidden-word", "keys.yaml", "https://ours", "127.0.0.1"):
            assert secret not in answer.text
        assert server.client.get(path).status_code == 401
        assert server.client.get(path, headers=TENANT).status_code == 403


@pytest.mark.parametrize("path", RESETS)
def test_a_reset_is_a_flush_with_its_authorisation(server: RunningServer, path: str) -> None:
    assert server.client.post(path).status_code == 401
    assert server.client.post(path, headers=TENANT).status_code == 403
    assert server.client.get(path, headers=OPERATOR).status_code == 405
    assert server.engine.num_flushes == 0
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"params": {"reset_external": "true", "reset_running_requests": "False"}},
        {"json": {"reset_running_requests": False}},
        {"json": {}},
        {"headers": OPERATOR | {"Origin": "https://ours"}},
        {"headers": OPERATOR | {"Origin": server.url}},
    )
    for options in cases:
        before = server.engine.num_flushes
        answer = server.client.post(path, **{"headers": OPERATOR, **options})
        assert answer.status_code == 200, answer.text
        assert server.engine.num_flushes == before + 1


@pytest.mark.parametrize("path", RESETS)
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_scripts_of_other_sites_empty_no_cache(
    server: RunningServer, path: str, origin: str
) -> None:
    answer = server.client.post(path, headers=OPERATOR | {"Origin": origin})
    assert answer.status_code == 403 and server.engine.num_flushes == 0
    assert answer.json()["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize("path", RESETS)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"params": {"reset_running_requests": "true"}}, "reset_running_requests"),
        ({"params": {"reset_external": "false"}}, "reset_external"),
        ({"params": {"reset_external": "maybe"}}, "reset_external"),
        ({"params": {"other": "1"}}, "other"),
        ({"json": {"reset_running_requests": True}}, "reset_running_requests"),
        ({"json": {"reset_external": False}}, "reset_external"),
        ({"json": {"other": 1}}, "other"),
    ],
)
def test_what_a_reset_does_not_do_is_named(
    server: RunningServer, path: str, options: dict[str, Any], named: str
) -> None:
    answer = server.client.post(path, headers=OPERATOR, **options)
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert server.engine.num_flushes == 0
