"""The order in which Serve asks replicas, without a cluster."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter

from vlm_serve.deploy import router
from vlm_serve.deploy import shared_state as shared
from vlm_serve.deploy.router import AffinityRouter
from vlm_serve.routing.router import Router
from vlm_serve.routing.view import ReplicaView, RequestUsage


class InTurn(Router):
    """One replica after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._next = itertools.count()

    def choose(
        self, keys: Sequence[bytes], tokens: int, replicas: Sequence[ReplicaView]
    ) -> list[str]:
        names = [replica.id for replica in replicas]
        first = next(self._next) % len(names)
        return [*names[first:], *names[:first]]


@pytest.fixture
def adapter() -> AffinityRouter:
    """Without what Serve's constructor connects to."""
    made = AffinityRouter.__new__(AffinityRouter)
    made.initialize_state()
    made._router = InTurn()
    return made


def replicas(*names: str) -> list[Any]:
    return [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={"load": 1.0})
        for name in names
    ]


def request(*args: Any, name: str = "one", **arguments: Any) -> Any:
    return SimpleNamespace(
        args=list(args),
        kwargs=arguments,
        routing_context=SimpleNamespace(should_backoff=False),
        metadata=SimpleNamespace(internal_request_id=name),
    )


def ranked(adapter: AffinityRouter, names: list[Any], pending: Any) -> list[list[str]]:
    groups = asyncio.run(adapter.choose_replicas(names, pending))
    return [[each.replica_id.unique_id for each in group] for group in groups]


def test_requests_go_to_the_replicas_in_turn(adapter: AffinityRouter) -> None:
    candidates = replicas("a", "b", "c")
    first = [ranked(adapter, candidates, request())[0][0] for _ in range(6)]
    assert sorted(first) == ["a", "a", "b", "b", "c", "c"]


def test_without_a_request_there_is_an_order_too(adapter: AffinityRouter) -> None:
    assert sorted(sum(ranked(adapter, replicas("a", "b"), None), [])) == ["a", "b"]


def test_a_request_that_names_its_replica_goes_nowhere_else(adapter: AffinityRouter) -> None:
    candidates = replicas("a", "b")
    assert ranked(adapter, candidates, request(replica="b")) == [["b"]]
    assert ranked(adapter, candidates, request(replica="gone")) == []


def test_avoided_replicas_come_last(adapter: AffinityRouter) -> None:
    candidates = replicas("a", "b", "c")
    for _ in range(3):
        assert ranked(adapter, candidates, request(avoid=("a", "b")))[0] == ["c"]
    assert len(ranked(adapter, replicas("a"), request(avoid=("a",)))) == 1


@pytest.mark.parametrize("pending", [None, "request"])
def test_it_never_raises(adapter: AffinityRouter, pending: Any) -> None:
    class Failing(InTurn):
        def choose(self, *_: Any) -> list[str]:
            raise ValueError("injected")

    adapter._router = Failing()
    asked = request() if pending else None
    assert ranked(adapter, replicas("a", "b"), asked) == [["a", "b"]]


def test_the_router_hears_of_requests_from_begin_to_end(
    adapter: AffinityRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[Any, ...]] = []

    class Noting(InTurn):
        def sent(self, *said: Any) -> None:
            heard.append(("sent", *said))

        def ended(self, *said: Any) -> None:
            heard.append(("ended", *said))

        def removed(self, name: str) -> None:
            heard.append(("removed", name))

    monkeypatch.setattr(shared, "SHARED_STATE", shared.SharedState(replicas=("a", "b")))
    adapter._router = Noting()
    (replica,) = replicas("a")
    adapter.on_request_routed(request("gateway", 7, keys=(b"k",)), replica.replica_id, None)
    assert shared.SHARED_STATE.routed == {7: "a"}
    adapter.on_request_completed(replica.replica_id, "one")
    adapter.on_request_completed(replica.replica_id, "one")
    assert len(heard) == 1, "its gateway has not read all of the answer"
    usage = RequestUsage(5, 0, 3)
    shared.SHARED_STATE.finish(7, usage)
    assert ranked(adapter, replicas("a", "b"), request())
    assert ranked(adapter, replicas("a", "b"), request())
    adapter._set_running(["b"])
    assert (
        shared.SHARED_STATE.replicas == ("b",)
        and not shared.SHARED_STATE.usage
        and not shared.SHARED_STATE.routed
    )
    ended = ("ended", "a", (b"k",), 0, usage)
    assert heard == [("sent", "a", (b"k",), 0), ended, ("removed", "a")]


def test_an_end_of_which_the_gateway_knows_nothing_is_told_at_once(
    adapter: AffinityRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "SHARED_STATE", shared.SharedState(replicas=("a",)))
    heard: list[Any] = []
    monkeypatch.setattr(adapter._router, "ended", lambda *said: heard.append(said))
    (replica,) = replicas("a")
    adapter.on_request_routed(request("gateway", 7, keys=(b"k",)), replica.replica_id, None)
    shared.SHARED_STATE.finish(7, None)
    adapter.on_request_completed(replica.replica_id, "one")
    assert heard == [("a", (b"k",), 0, None)]


def test_requests_of_whose_ends_nobody_tells_count_as_ended(
    adapter: AffinityRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "SHARED_STATE", shared.SharedState(replicas=("a",)))
    monkeypatch.setattr(router, "MAX_OPEN", 3)
    heard: list[Any] = []
    monkeypatch.setattr(adapter._router, "ended", lambda *said: heard.append(said))
    (replica,) = replicas("a")
    for number in range(5):
        asked = request("gateway", number, name=f"request {number}", keys=(bytes([number]),))
        adapter.on_request_routed(asked, replica.replica_id, None)
        shared.SHARED_STATE.finish(number, None)
    assert len(adapter._sent) == 3
    assert ranked(adapter, replicas("a"), request())
    assert heard == [("a", (bytes([number]),), 0, None) for number in (0, 1)]
    assert not adapter._completed


def test_the_shared_state_keeps_the_last_usage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "MAX_USAGE", 3)
    kept = shared.SharedState()
    for number in range(10):
        kept.finish(number, RequestUsage(1, 0, number))
    assert list(kept.usage) == [7, 8, 9]


def test_the_shared_state_tells_an_end_in_order_from_a_death(
    adapter: AffinityRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "SHARED_STATE", shared.SharedState(replicas=("a", "b", "c")))
    for name in ("update_replicas", "on_replica_actor_died"):
        monkeypatch.setattr(RequestRouter, name, lambda *_: None)
    adapter.on_replica_actor_died(replicas("a")[0].replica_id)
    adapter.update_replicas(replicas("c"))
    assert shared.SHARED_STATE.replicas == ("c",) and shared.SHARED_STATE.retired == ("b",)


def test_serve_carries_the_class_but_not_the_shared_state() -> None:
    named: dict[str, Any] = {"request_router_class": "vlm_serve.deploy.router:AffinityRouter"}
    carried: Any = RequestRouterConfig(**named).get_request_router_class()
    assert carried.update_replicas.__globals__["shared"] is shared


def test_who_is_not_admitted_gets_what_names_it_only(
    adapter: AffinityRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.SHARED_STATE, "admitted", frozenset({"b"}))
    candidates = replicas("a", "b")
    assert ranked(adapter, candidates, request()) == [["b"]]
    assert ranked(adapter, candidates, request(replica="a")) == [["a"]]
    monkeypatch.setattr(shared.SHARED_STATE, "admitted", frozenset())
    assert ranked(adapter, candidates, request()) == []
