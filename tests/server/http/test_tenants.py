"""Salts that the operator has bound to API keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from hostile_files import data_url, image_of
from serving import RunningServer, chat_body, running

from vlm_serve.engine.engine import Engine
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.tenants import read_tenant_keys

PICTURE = {
    "type": "image_url",
    "image_url": {"url": data_url("image/png", image_of("PNG", 96, 96))},
}
QUESTION = {"type": "text", "text": "What do you see?"}
KEYS = '"key-a": alice\nkey-b: bob\n'


@pytest.fixture
def server(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[RunningServer]:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS, encoding="utf-8")
    config = ServerConfig(port=0, api_key=("plain",), tenant_keys=str(file))
    with running(FakeEngine(tokenizer), config) as server:
        yield server


def asked(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def salt_used(server: RunningServer, key: str, **fields: Any) -> str:
    answer = server.post("/v1/chat/completions", chat_body(**fields), **asked(key))
    assert answer.status_code == 200, answer.text
    salt: str = server.engine.preprocessor.calls[-1]["cache_salt"]
    return salt


def test_a_bound_salt_wins(server: RunningServer) -> None:
    alice, bob = salt_used(server, "key-a"), salt_used(server, "key-b")
    assert len({alice, bob, salt_used(server, "plain")}) == 3
    for salt in ("bob", bob, "other", ""):
        assert salt_used(server, "key-a", cache_salt=salt) == alice
    assert salt_used(server, "plain", cache_salt="alice") == "alice" != alice


def test_every_form_of_a_request_has_the_bound_salt(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = salt_used(server, "key-a")
    calls = server.engine.preprocessor.calls
    for path, body in (
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 5, **chat_body()}),
    ):
        answer = server.post(path, body | {"cache_salt": "x"}, **asked("key-a"))
        assert answer.status_code == 200, answer.text
        assert calls[-1]["cache_salt"] == alice
    salts = []
    prepare = server.engine.preprocessor.prepare_tokens

    def watched(token_ids: Any, *, cache_salt: str = "") -> Any:
        salts.append(cache_salt)
        return prepare(token_ids, cache_salt=cache_salt)

    monkeypatch.setattr(server.engine.preprocessor, "prepare_tokens", watched)
    body = {"prompt": "hi", "cache_salt": "x"}
    assert server.post("/v1/completions", body, **asked("key-a")).status_code == 200
    assert salts == [alice]


def test_tenants_do_each_others_work_again(checkpoint: Path, tmp_path: Path) -> None:
    """The same picture and prompt cost the second tenant what they cost the first: no less work is
    done, so no time is saved that could be measured. (`benchmarks/tenants.py` measures it.)"""
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS, encoding="utf-8")
    options = ServerConfig(port=0, api_key=("plain",), tenant_keys=str(file))
    engine = Engine.from_checkpoint(
        str(checkpoint),
        EngineConfig(
            device="cpu", block_size=16, cache_memory="48MiB", max_model_len=2048, threads=1
        ),
    )
    body = {"messages": [{"role": "user", "content": [PICTURE, QUESTION]}], "max_tokens": 2}
    body |= {"temperature": 0, "cache_report": True}
    with running(engine, options) as server:
        found: dict[str, list[dict[str, Any]]] = {"key-a": [], "key-b": []}
        blocks, texts, trees = [0], set[str](), list[list[dict[str, Any]]]()
        for key in ("key-a", "key-b", "key-a", "key-b"):
            answer = server.post("/v1/chat/completions", body, **asked(key)).json()
            found[key].append(answer["cache_report"])
            texts.add(answer["choices"][0]["message"]["content"])
            stats = server.client.get("/v1/cache/stats", **asked("plain")).json()
            trees.append(server.client.get("/v1/cache/tree", **asked(key)).json()["nodes"])
            blocks.append(stats["usage"]["cached_blocks"])
    reasons = [[report.pop("reason") for report in found[key]] for key in ("key-a", "key-b")]
    assert [each[0] for each in reasons] == ["cold", "salt"]
    for reports in found.values():
        for report in reports:
            report.pop("boundary_key")  # a key of a tenant's own tree
    assert found["key-a"] == found["key-b"]
    cold, warm = found["key-a"]
    assert (cold["boundary"], cold["kv_boundary"]) == (0, 0)
    assert (cold["media_decoded"], cold["media_encoded"], cold["media_skipped"]) == (1, 1, 0)
    assert warm["boundary"] > 0
    assert (warm["media_encoded"], warm["media_skipped"]) == (0, 1)
    assert blocks[2] - blocks[1] == blocks[1] > 0  # the second tenant holds as much once more
    assert blocks[4] == blocks[2]
    assert len(texts) == 1
    for nodes in trees:  # a number of the physical block would count what others have
        assert [each["block"] for each in nodes] == [int(each["key"][:12], 16) for each in nodes]
        assert len(nodes) > 1


def test_nobody_can_ask_for_a_bound_salt(server: RunningServer) -> None:
    body = chat_body(cache_salt=salt_used(server, "key-a"))
    answer = server.post("/v1/chat/completions", body, **asked("plain"))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


def test_what_concerns_all_is_not_for_tenants(server: RunningServer) -> None:
    for method, path in (("POST", "flush"), ("GET", "stats"), ("GET", "affinity")):
        url = f"/v1/cache/{path}"
        body: Any = {} if method == "POST" else None
        answer = server.client.request(method, url, json=body, **asked("key-a"))
        assert answer.status_code == 403, path
        assert answer.json()["error"]["type"] == "permission_error"


def test_an_unknown_key_is_refused(server: RunningServer) -> None:
    answer = server.post("/v1/chat/completions", chat_body(), **asked("alice"))
    assert answer.status_code == 401


@pytest.mark.parametrize(
    "text", ["", "- key", "key: 5", "5: salt", "key: ''", "key: a b", "key: {}", "key: [", "k: ü"]
)
def test_a_bad_file_is_refused_without_showing_keys(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="tenant_keys") as raised:
        read_tenant_keys(str(file))
    assert (
        "salt of" in str(raised.value)
        or "must map" in str(raised.value)
        or "YAML" in str(raised.value)
    )


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_tenant_keys(str(tmp_path / "none.yaml"))
