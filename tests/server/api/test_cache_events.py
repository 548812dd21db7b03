"""The stream of the cache's events: whoever follows it knows the tree."""

from __future__ import annotations

import itertools
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cache_reader import PATH, EventReader, reading, tree
from hostile_files import data_url, image_of
from serving import WAIT_SECONDS, RunningServer, chat_body, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server import cache_feed
from vlm_serve.server.cache_feed import MAX_SUBSCRIBERS
from vlm_serve.server.config import ServerConfig

PICTURE = {
    "type": "image_url",
    "image_url": {"url": data_url("image/png", image_of("PNG", 96, 96))},
}
TEXT = "What would be found of this conversation if it came a second time?"
KEYS = '"key-a": alice\n"key-b": bob\n'


def engine_of(checkpoint: Path) -> Engine:
    config = EngineConfig(
        device="cpu", block_size=16, cache_memory="8MiB", max_model_len=1024, threads=1
    )
    return Engine.from_checkpoint(str(checkpoint), config)


@pytest.fixture(scope="module")
def _server(checkpoint: Path) -> Iterator[RunningServer]:
    with running(engine_of(checkpoint), ServerConfig(port=0, idle_check=False)) as server:
        yield server


@pytest.fixture
def server(_server: RunningServer) -> Iterator[RunningServer]:
    _server.engine.flush()
    yield _server
    wait_for(lambda: _server.service.cache_feed.num_subscribers == 0)
    assert _server.service.cache_feed._polling is None
    assert not _server.engine._cache.events.node_used.subscribers
    _server.engine.check()


def agrees(server: RunningServer, reader: EventReader, **options: Any) -> bool:
    return reader.nodes == tree(server, **options)


def ask(server: RunningServer, *parts: Any, **fields: Any) -> Any:
    key = fields.pop("api_key", "")
    answer = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4} | fields,
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_it_begins_with_the_whole_and_goes_on_with_changes(server: RunningServer) -> None:
    ask(server, text(TEXT))
    with reading(server) as reader:
        wait_for(lambda: bool(reader.named("tree")) and agrees(server, reader))
        first = reader.named("tree")[0]
        assert first["nodes"] and len(first["roots"]) == 1
        ask(server, PICTURE, text("What is it?"))
        ask(server, PICTURE, text("What else?"))
        wait_for(lambda: len(reader.hits) == 2 and agrees(server, reader))
        assert len(reader.named("tree")) == 1
        numbers = [number for number, _, _ in reader.messages]
        assert numbers == sorted(numbers)
    cold, hit = reader.hits
    assert (cold["key"], cold["cached_tokens"]) == ("", 0)
    assert hit["cached_tokens"] > 0 and reader.nodes[hit["key"]]["end"] == hit["cached_tokens"]
    media = [each for node in reader.nodes.values() for each in node["media"]]
    assert [each["kind"] for each in media] == ["image"] * len(media)
    assert media and all(len(each["hash"]) == 16 for each in media)
    assert any(node["snapshot"] == "media" for node in reader.nodes.values())


def is_kept(server: RunningServer, number: int) -> bool:
    """Whether the history has a status after that many steps."""
    return any(status["steps"] == number for _, status in feed_of(server).history())


def test_who_comes_late_is_told_the_last_minutes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statuses and events of a time without readers, oldest first."""
    monkeypatch.setattr(cache_feed, "HISTORY_SECONDS", 0.05)
    with running(engine_of(checkpoint), ServerConfig(port=0, idle_check=False)) as server:
        for _ in range(2):
            ask(server, text(TEXT))
            number = server.engine.stats()["num_steps"]
            wait_for(partial(is_kept, server, number))
        with reading(server) as reader:
            wait_for(lambda: bool(reader.named("history")))
            assert [name for _, name, _ in reader.messages[:2]] == ["tree", "history"]
            (told,) = reader.named("history")
        ages = [each["age_seconds"] for each in told["statuses"]]
        assert ages == sorted(ages, reverse=True)
        assert told["statuses"][-1]["steps"] == number
        cold, hit = (each for each in told["events"] if each["type"] == "hit")
        assert (cold["cached_tokens"], cold["reason"]) == (0, "cold")
        assert hit["cached_tokens"] > 0
        added = [each for each in told["events"] if each["type"] == "node_added"]
        assert sum(each["nodes"] for each in added) == len(tree(server))


def test_an_idle_engine_is_not_asked(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "HISTORY_SECONDS", 0.02)
    with running(engine_of(checkpoint), ServerConfig(port=0, idle_check=False)) as server:
        ask(server, text(TEXT))
        feed = feed_of(server)
        seen: list[int] = []

        def quiet() -> bool:
            seen.append(feed.status_number)
            return len(seen) > 20 and len(set(seen[-20:])) == 1

        wait_for(quiet)


def test_random_load_is_followed(server: RunningServer) -> None:
    """A cache that is too small for it, requests that end early, pins and flushes."""
    rng = random.Random(5)

    def client(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(12):
            words = " ".join(own.choice("abcdef") for _ in range(own.randint(1, 200)))
            if own.random() < 0.2:
                body = chat_body(words, max_tokens=200, stream=True)
                with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
                    next(response.iter_text())
            else:
                ask(
                    server,
                    *[PICTURE] * own.randint(0, 1),
                    text(words),
                    max_tokens=own.randint(1, 30),
                )

    with reading(server) as reader, reading(server) as late:
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            nodes = list(tree(server))
            if nodes and rng.random() < 0.5:
                body = {"key": rng.choice(nodes), "ttl_seconds": rng.choice([0.01, 0.5])}
                assert server.post("/v1/cache/pin", body).status_code in (200, 404)
            elif rng.random() < 0.1:
                server.engine.flush()
        for thread in threads:
            thread.join()
        while not server.engine.stats()["cache"]["evictions"].get("kv"):  # flushes came too often
            ask(server, text(" ".join(rng.choices("abcdef", k=400))), max_tokens=1)
        wait_for(lambda: server.service.requests.num_open == 0)
        wait_for(lambda: not any(node["pins"] for node in tree(server).values()))
        wait_for(lambda: agrees(server, reader) and agrees(server, late))
        assert reader.hits and len(reader.named("changes")) > 3


def test_totals_come_about_once_a_second(server: RunningServer) -> None:
    with reading(server) as reader:
        ask(server, text(TEXT))
        wait_for(lambda: len(reader.named("status")) >= 2)
        stats = server.engine.stats()
        wait_for(lambda: reader.named("status")[-1]["steps"] == stats["num_steps"])
        status = reader.named("status")[-1]
    assert status["prompt_tokens"] == stats["cache"]["query_tokens"]
    assert status["usage"] == stats["usage"]
    assert status["time_to_first_token_seconds"]["count"] >= 1
    assert status["time_to_first_token_seconds"]["p50"] > 0
    assert 0 < status["inter_token_seconds"]["p50"] <= status["inter_token_seconds"]["p99"]
    assert status["generated_tokens"] >= 4
    assert 0 < status["memory"]["kv"] <= status["memory_limits"]["kv"]
    assert status["memory"].keys() == status["memory_limits"].keys()
    assert (status["running"], status["waiting"]) == (0, 0)


def test_nothing_of_what_was_said_is_told(server: RunningServer) -> None:
    with reading(server) as reader:
        answer = ask(server, text("Nightingale"), request_id="my-own-request")
        wait_for(lambda: bool(reader.hits) and agrees(server, reader))
    told = json.dumps(reader.messages)
    assert "ightingale" not in told and "my-own-request" not in told and answer["id"] not in told


def test_no_more_than_eight_read_it(server: RunningServer) -> None:
    with ExitStack() as stack:
        readers = [stack.enter_context(reading(server)) for _ in range(MAX_SUBSCRIBERS)]
        wait_for(lambda: all(reader.named("tree") for reader in readers))
        refused = server.client.get(PATH)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_subscribers"
        assert refused.headers["retry-after"]
        assert server.client.head(PATH).status_code == 200, "that asks for no stream"
    wait_for(lambda: server.service.cache_feed.num_subscribers == 0)
    with reading(server) as reader:
        wait_for(lambda: bool(reader.named("tree")))


def test_who_falls_behind_is_told_the_whole_again(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine.mirror, "_limit", 3)
    with reading(server) as reader:
        wait_for(lambda: bool(reader.named("tree")))
        ask(server, text(TEXT * 5))
        wait_for(lambda: len(reader.named("tree")) >= 2 and agrees(server, reader))
        assert reader.nodes


def test_who_never_reads_is_let_go(checkpoint: Path) -> None:
    """And holds up nobody meanwhile."""
    options = ServerConfig(port=0, idle_check=False, send_timeout=4.0)
    with running(engine_of(checkpoint), options) as server, ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(2):
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            raw.connect((host, int(port)))
            raw.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        feed = server.service.cache_feed
        wait_for(lambda: feed.num_subscribers == 2)  # an empty tree fits into their buffers
        reader = stack.enter_context(reading(server))
        wait_for(lambda: bool(reader.named("tree")))
        numbers = itertools.count()

        def one_is_left() -> bool:
            ask(server, text(f"{next(numbers)} " + TEXT * 8), max_tokens=1)
            return feed.num_subscribers == 1

        wait_for(one_is_left)
        wait_for(lambda: agrees(server, reader))


def test_other_websites_take_no_places(server: RunningServer) -> None:
    answer = server.client.get(PATH, headers={"Sec-Fetch-Mode": "no-cors"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_cors")
    with reading(server, headers={"Sec-Fetch-Mode": "cors"}) as reader:
        wait_for(lambda: bool(reader.named("tree")))


def test_it_takes_no_parameters(server: RunningServer) -> None:
    answer = server.client.get(PATH, params={"since": "3"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "since")


def test_it_ends_with_the_server(checkpoint: Path) -> None:
    options = ServerConfig(port=0, shutdown_timeout=600.0)
    with running(engine_of(checkpoint), options) as server, reading(server) as reader:
        wait_for(lambda: bool(reader.named("tree")))
        server.server.should_exit = True
        assert reader.ended.wait(WAIT_SECONDS), "the server waited for its readers"
        with pytest.raises(Exception, match="shutting down"), feed_of(server).subscribed():
            pass


def test_it_ends_with_the_engine(checkpoint: Path) -> None:
    with running(engine_of(checkpoint)) as server, reading(server) as reader:
        wait_for(lambda: bool(reader.named("tree")))
        server.engine.close()
        assert reader.ended.wait(WAIT_SECONDS)
        assert server.client.get(PATH).status_code == 503


def feed_of(server: RunningServer) -> Any:
    return server.service.cache_feed


@pytest.fixture
def shared(checkpoint: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server with two tenants and a key that belongs to nobody."""
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS, encoding="utf-8")
    options = ServerConfig(port=0, api_key=("plain",), tenant_keys=str(file))
    with running(engine_of(checkpoint), options) as server:
        yield server


def asked(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_nobody_keeps_others_from_reading(shared: RunningServer) -> None:
    def headers(key: str) -> dict[str, Any]:
        return {"headers": {"Authorization": f"Bearer {key}"}}

    with ExitStack() as stack:
        for _ in range(MAX_SUBSCRIBERS):
            stack.enter_context(reading(shared, **headers("key-a")))
        refused = shared.client.get(PATH, **headers("key-a"))
        assert refused.json()["error"]["code"] == "too_many_subscribers"
        for key in ("key-b", "plain"):
            stack.enter_context(reading(shared, **headers(key)))
        assert feed_of(shared).num_subscribers == MAX_SUBSCRIBERS + 2
    wait_for(lambda: feed_of(shared).num_subscribers == 0)


def test_tenants_see_what_is_theirs(shared: RunningServer) -> None:
    assert shared.client.get(PATH).status_code == 401
    with (
        reading(shared, **asked("key-a")) as alice,
        reading(shared, **asked("key-b")) as bob,
        reading(shared, **asked("plain")) as operator,
    ):
        ask(shared, text(TEXT), api_key="key-a")
        ask(shared, text(TEXT), api_key="key-a")
        ask(shared, PICTURE, text("What is it?"), api_key="key-b")
        ask(shared, text(TEXT), api_key="plain")
        wait_for(lambda: len(operator.hits) == 4 and agrees(shared, operator, **asked("plain")))
        wait_for(lambda: len(alice.hits) == 2 and agrees(shared, alice, **asked("key-a")))
        wait_for(lambda: len(bob.hits) == 1 and agrees(shared, bob, **asked("key-b")))
        wait_for(lambda: bool(operator.named("status")))
        (past,) = alice.named("history")
        assert (past["statuses"], past["events"]) == ([], [])
        assert alice.nodes and bob.nodes and not alice.nodes.keys() & bob.nodes.keys()
        assert alice.nodes.keys() | bob.nodes.keys() < operator.nodes.keys()
        assert not alice.named("status") and not bob.named("status")
        numbers = [number for number, _, _ in bob.messages]
        assert numbers == list(range(1, len(numbers) + 1)), "a number tells of others' doings"
    with reading(shared, **asked("key-a")) as alice:
        wait_for(lambda: bool(alice.named("history")))
        (past,) = alice.named("history")
        assert past["statuses"] == []
        assert [each["type"] for each in past["events"]].count("hit") == 2
    # By key: a tenant reaches no node of another.
    (theirs, *_), (own, *_) = bob.nodes, alice.nodes
    for path, body in (("nodes/%s", None), ("pin", {"ttl_seconds": 1, "key": "%s"})):
        for key, status in ((theirs, 404), (own, 200)):
            url = "/v1/cache/" + (path % key if body is None else path)
            sent: Any = body and body | {"key": key}
            answer = shared.client.request(
                "GET" if body is None else "POST", url, json=sent, **asked("key-a")
            )
            assert answer.status_code == status, answer.text
    own_node = shared.client.get(f"/v1/cache/nodes/{own}", **asked("key-a")).json()
    assert own_node["token_ids"] is None
    seen = shared.client.get(f"/v1/cache/nodes/{own}", **asked("plain")).json()
    assert len(seen["token_ids"]) == seen["end"] - seen["start"]
