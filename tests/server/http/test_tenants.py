"""Salts that the operator has bound to API keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from hostile_files import data_url, image_of
from serving import RunningServer, chat_body, running

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.tenant import Tenant
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.auth import Owner, bind, owner_of, state_of
from vlm_serve.server.http.tenants import (
    Places,
    TenantKey,
    read_tenant_keys,
    tenant_at,
    tenant_of,
)

PICTURE = {
    "type": "image_url",
    "image_url": {"url": data_url("image/png", image_of("PNG", 96, 96))},
}
QUESTION = {"type": "text", "text": "What do you see?"}
KEYS = '"key-a": alice\nkey-b: {salt: bob, weight: 2}\n'


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
    "text",
    [
        *("", "- key", "key: 5", "5: salt", "key: ''", "key: a b", "key: {}", "key: [", "k: ü"),
        *("key: {weight: 3}", "key: {salt: 5}", "key: {salt: [s]}"),
    ],
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


@pytest.mark.parametrize("weight", ["0", "-1", "1001", "1.5", "true", "'3'", "[3]", ".inf", "null"])
def test_a_bad_weight_is_refused_by_its_entry(tmp_path: Path, weight: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"first: s\nsecret: {{salt: s, weight: {weight}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="weight of entry 2 must be a whole number") as raised:
        read_tenant_keys(str(file))
    assert "secret" not in str(raised.value)


def test_an_unknown_field_of_an_entry_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("secret: {salt: s, weigth: 3}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="entry 1 may have a salt and a weight and nothing else"):
        read_tenant_keys(str(file))


def test_weights_stand_beside_salts(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("a: one\nb: {salt: two}\nc: {salt: three, weight: 1000}\n", encoding="utf-8")
    assert read_tenant_keys(str(file)) == {
        "a": TenantKey("one", 1),
        "b": TenantKey("two", 1),
        "c": TenantKey("three", 1000),
    }


def test_a_request_counts_for_its_key_whatever_it_says(server: RunningServer) -> None:
    tenants: dict[str, set[Tenant]] = {}
    for key in ("key-a", "key-b", "plain"):
        for fields in ({}, {"user": "other", "metadata": {"tenant": "other"}, "priority": -5}):
            salt_used(server, key, **fields)
            tenants.setdefault(key, set()).add(server.engine.latest_tenant)
    salt_used(server, "plain", cache_salt="other")
    tenants["plain"].add(server.engine.latest_tenant)
    assert tenants == {
        "key-a": {Tenant("tenant 1", 1, "tenant 1")},
        "key-b": {Tenant("tenant 2", 2, "tenant 2")},
        "plain": {Tenant("api_key 1", 1, "api_key 1")},
    }


def test_without_keys_the_address_counts(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer), ServerConfig(port=0)) as server:
        headers = {"X-Forwarded-For": "10.0.0.1", "Forwarded": "for=10.0.0.1"}
        answer = server.post("/v1/chat/completions", chat_body(), headers=headers)
        assert answer.status_code == 200
        tenant = server.engine.latest_tenant
        assert tenant.label == "addresses" and tenant.name.startswith("address ")
        assert "10.0.0.1" not in tenant.name
        assert "10.0.0.1" not in server.client.get("/metrics").text


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_addresses_that_are_one_client(one: str, other: str, same: bool) -> None:
    assert (tenant_at((one, 1)) == tenant_at((other, 2))) is same


def test_a_unix_socket_is_one_client() -> None:
    assert tenant_at(None) == tenant_at(("", 0))


def test_an_owner_keeps_whom_its_requests_count_for() -> None:
    scope: dict[str, Any] = {"state": {}}
    bind(scope, b"digest", "alice", Tenant("tenant 1", 3, "tenant 1"))
    owner = owner_of(scope, None)
    assert tenant_of({"state": state_of(owner)}) == Tenant("tenant 1", 3, "tenant 1")
    assert owner == Owner(b"digest", "tenant:alice"), "a change of weight changes no owner"


def test_a_tenant_has_its_share_of_a_full_queue() -> None:
    places, heavy, light = Places(), Tenant("heavy", 3), Tenant("light", 1)
    places.add(heavy, 8)
    assert places.may_add(heavy, 7, 8) and not places.may_add(heavy, 8, 8)
    places.add(light, 1)
    assert places.may_add(light, 9, 8)
    places.add(light, 1)
    assert not places.may_add(light, 10, 8), "a quarter is its share"
    places.add(heavy, -3)
    assert places.may_add(heavy, 8, 8)
    assert not places.may_add(heavy, 16, 8), "nobody gets in beyond twice the limit"


def test_others_fill_the_queue_of_all_but_not_ones_own_share(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS, encoding="utf-8")
    engine = FakeEngine(tokenizer, EngineConfig(block_size=16, max_num_seqs=2))
    config = ServerConfig(port=0, tenant_keys=str(file), max_queued_requests=2)
    with running(engine, config) as server, ExitStack() as others:
        for _ in range(4):
            others.enter_context(server.service.requests.counted(Tenant("tenant 2", 2)))
        body = chat_body()
        assert server.post("/v1/chat/completions", body, **asked("key-b")).status_code == 503
        assert server.post("/v1/chat/completions", body, **asked("key-a")).status_code == 200
