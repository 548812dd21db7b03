"""A tenant sees what its prompts with adapters have left in the cache, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cache_reader import reading
from families import SPECS
from make_checkpoint import make_checkpoint
from peft_folders import random_adapter
from serving import RunningServer, chat_body, ok, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

TEXT = "This text is long enough for two blocks, and it shall stay where it is for a while."


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("visible")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[RunningServer]:
    path = make_checkpoint(place / "model", SPECS["text, tied"])
    for seed in range(2):
        random_adapter(path, place / "adapters" / str(seed), seed)
    keys = place / "keys.yaml"
    keys.write_text("key-a: alice\nkey-b: bob\n", encoding="utf-8")
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="16MiB",
        lora_modules=(f"tuned={place / 'adapters' / '0'}",),
    )
    options = ServerConfig(
        port=0,
        api_key=("plain",),
        tenant_keys=str(keys),
        allow_runtime_lora=True,
        allowed_lora_path=str(place / "adapters"),
    )
    with running(Engine.from_checkpoint(str(path), config), options) as made:
        yield made


def asked(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def ask(server: RunningServer, key: str, model: str) -> None:
    body = chat_body(TEXT, model=model, max_tokens=1)
    ok(server.client.post("/v1/chat/completions", json=body, **asked(key)))


def keys_of(server: RunningServer, key: str) -> set[str]:
    """Return the keys of the nodes that a client sees."""
    found = ok(server.client.get("/v1/cache/tree?limit=1000", **asked(key)))["nodes"]
    return {each["key"] for each in found}


def test_nodes_of_adapters_are_their_tenant_s(server: RunningServer, place: Path) -> None:
    with (
        reading(server, **asked("key-a")) as alice,
        reading(server, **asked("key-b")) as bob,
    ):
        ask(server, "key-b", "tuned")
        ask(server, "key-a", "tuned")
        tuned = keys_of(server, "key-a")
        assert tuned and not tuned & keys_of(server, "key-b")
        # One that is loaded while the stream runs.
        body = {"lora_name": "later", "lora_path": str(place / "adapters" / "1")}
        ok(server.client.post("/v1/load_lora_adapter", json=body, **asked("plain")))
        ask(server, "key-a", "later")
        mine, theirs = keys_of(server, "key-a"), keys_of(server, "key-b")
        assert tuned < mine and theirs and not mine & theirs
        wait_for(lambda: alice.nodes.keys() == mine and bob.nodes.keys() == theirs)
        assert len(alice.hits) == 2 and len(bob.hits) == 1
    for own in tuned:
        assert server.client.get(f"/v1/cache/nodes/{own}", **asked("key-a")).status_code == 200
        assert server.client.get(f"/v1/cache/nodes/{own}", **asked("key-b")).status_code == 404


def test_a_pinned_node_of_an_adapter_is_its_tenant_s(server: RunningServer) -> None:
    ask(server, "key-a", "tuned")
    pin = {"key": min(keys_of(server, "key-a")), "ttl_seconds": 60}
    ok(server.client.post("/v1/cache/pin", json=pin, **asked("key-a")))
    for key, count in (("key-b", 0), ("key-a", 1), ("plain", 1)):
        assert ok(server.client.get("/v1/cache/pins", **asked(key)))["total"] == count
    assert ok(server.client.delete("/v1/cache/pins", **asked("key-b")))["lifted"] == 0
    assert ok(server.client.delete("/v1/cache/pins", **asked("key-a")))["lifted"] == 1
