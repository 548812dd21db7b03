"""Orders whose replicas fail in the middle, without a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

import pytest
from fastapi import Request
from starlette.types import Message

from vlm_serve.deploy.channel import READY_TYPE
from vlm_serve.deploy.orders import Orders
from vlm_serve.deploy.replica_pool import ReplicaCall, ReplicaLostError, ReplicaPool
from vlm_serve.errors import VlmServeError
from vlm_serve.server.config import ServerConfig

OLD, NEW = "old", "new"


class Replicas:
    """Replicas of which some fail at a given point: `at` is {name: point}."""

    def __init__(self, **at: str) -> None:
        self.at, self.weights = at, {"r1": OLD, "r2": OLD}
        self.admitted: frozenset[str] = frozenset()
        self.away: set[str] = set()
        self.expelled: list[str] = []
        self.told: list[tuple[str, str]] = []
        self._decided: dict[str, asyncio.Future[bool]] = {}

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(name for name in self.weights if name not in self.away)

    def admit(self, names: frozenset[str]) -> None:
        self.admitted = names

    def expel(self, name: str) -> None:
        self.expelled.append(name)

    async def decide(self, name: str, order: str, *, go: bool) -> None:
        self._decided[name].set_result(go)

    async def answers(self, call: ReplicaCall) -> AsyncGenerator[Message, None]:
        name, path = str(call.replica), call.scope["path"]
        self.told.append((name, path))
        point = self.at.get(name)
        if path.startswith("/update"):
            if point == "read":
                raise ReplicaLostError(name)
            if "vlm_serve.order" in call.scope:
                self._decided[name] = asyncio.get_running_loop().create_future()
                yield {"type": READY_TYPE, "weights": NEW}
                if not await self._decided[name]:
                    for message in reply(400, {"error": {"message": "no", "type": "x"}}):
                        yield message
                    return
                if point == "swap":
                    raise ReplicaLostError(name)
            self.weights[name] = NEW
        if point == path:
            for message in reply(400, {"error": {"message": "no room", "type": "x"}}):
                yield message
            return
        for message in reply(200, {"weights": self.weights[name], "tags": ["kv_cache"]}):
            yield message


def reply(status: int, body: Mapping[str, Any]) -> list[Message]:
    return [
        {"type": "http.response.start", "status": status, "headers": []},
        {"type": "http.response.body", "body": json.dumps(body).encode()},
    ]


def request(path: str, client: str = "127.0.0.1") -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [],
        "query_string": b"",
    }
    scope |= {"http_version": "1.1", "scheme": "http", "client": (client, 1), "server": None}
    return Request(scope, receive)


async def begun(replicas: Replicas, serving: int = 2) -> tuple[Orders, asyncio.Task[None]]:
    orders = Orders(cast(ReplicaPool, replicas), ServerConfig(page=False), allowed=True)
    running = asyncio.ensure_future(orders.run())
    while len(replicas.admitted) < serving:
        await asyncio.sleep(0)
    return orders, running


def follow(replicas: Replicas, path: str) -> tuple[Orders, VlmServeError | None]:
    async def work() -> tuple[Orders, VlmServeError | None]:
        orders, running = await begun(replicas)
        running.cancel()
        try:
            assert (await orders.follow(request(path))).status_code == 200
        except VlmServeError as error:
            return orders, error
        return orders, None

    return asyncio.run(work())


def test_a_replica_lost_while_it_reads_changes_nothing() -> None:
    replicas = Replicas(r2="read")
    orders, error = follow(replicas, "/update_weights_from_disk")
    assert error is not None and error.code == "replica_lost" and "replica r2" in error.message
    assert replicas.weights == {"r1": OLD, "r2": OLD} and replicas.admitted == {"r1", "r2"}
    assert orders.may_continue(0)


def test_a_replica_lost_while_it_swaps_is_taken_out_and_brought_to_the_new_weights() -> None:
    async def work() -> None:
        replicas = Replicas(r2="swap")
        orders, running = await begun(replicas)
        answer = await orders.follow(request("/update_weights_from_disk"))
        assert answer.status_code == 200 and replicas.weights == {"r1": NEW, "r2": OLD}
        assert replicas.admitted == {"r1"} and replicas.expelled == ["r2"]
        assert "r2" in orders.apart and not orders.may_continue(0)
        while len(replicas.admitted) < 2:
            await asyncio.sleep(0.01)
        assert replicas.weights["r2"] == NEW and not orders.apart
        running.cancel()

    asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/pause_generation"])
def test_a_replica_out_of_reach_during_an_order_serves_only_once_it_has_followed(path: str) -> None:
    """The replica comes back before anybody has looked."""

    async def work() -> None:
        replicas = Replicas()
        orders, running = await begun(replicas)
        replicas.away, told = {"r2"}, len(replicas.told)
        assert (await orders.follow(request(path))).status_code == 200
        replicas.away = set()
        assert replicas.admitted == {"r1"} and ("r2", path) not in replicas.told[told:]
        while len(replicas.admitted) < 2:
            await asyncio.sleep(0.01)
        running.cancel()
        assert ("r2", path) in replicas.told[told:]

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_pause_goes_on_everywhere_if_one_refuses_to_end_it() -> None:
    async def work() -> None:
        replicas = Replicas()
        orders, running = await begun(replicas)
        running.cancel()
        assert (await orders.follow(request("/pause_generation"))).status_code == 200
        replicas.at["r2"], told = "/continue_generation", len(replicas.told)
        with pytest.raises(VlmServeError) as caught:
            await orders.follow(request("/continue_generation"))
        assert caught.value.message == "replica r2: no room"
        of_first = [path for name, path in replicas.told[told:] if name == "r1"]
        assert of_first[0] == "/continue_generation" and of_first[-1] == "/pause_generation"

    asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/pause_generation"])
def test_what_one_refuses_the_others_undo(path: str) -> None:
    replicas = Replicas(r2=path)
    orders, error = follow(replicas, path)
    assert error is not None and error.message == "replica r2: no room" and error.status == 400
    undone = [told for name, told in replicas.told[replicas.told.index(("r1", path)) :]]
    wakes = "/resume_memory_occupation", "/continue_generation"
    assert [told for told in undone if told in wakes] == list(wakes)
    assert not orders.parts and replicas.admitted == {"r1", "r2"}


def test_nobody_from_elsewhere_gives_orders_without_a_key() -> None:
    async def work() -> None:
        orders, running = await begun(replicas := Replicas())
        running.cancel()
        told = len(replicas.told)
        with pytest.raises(VlmServeError, match="clients on this machine only"):
            await orders.follow(request("/pause", "10.0.0.1"))
        assert len(replicas.told) == told

    asyncio.run(work())


def test_tensors_need_a_replica_that_has_the_others() -> None:
    async def work() -> None:
        orders, running = await begun(replicas := Replicas())
        assert (await orders.follow(request("/update_weights_from_tensor"))).status_code == 200
        replicas.weights = {"r3": OLD}
        while "r3" not in orders.apart:
            await asyncio.sleep(0.01)
        running.cancel()
        assert not replicas.admitted and "came from memory" in orders.apart["r3"]
        with pytest.raises(VlmServeError, match="update from a folder"):
            await orders.follow(request("/update_weights_from_tensor"))

    asyncio.run(asyncio.wait_for(work(), 30))
