"""What the pool of replicas tells their routers, without a cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from ray.serve.handle import DeploymentHandle

from vlm_serve.deploy import replica_pool
from vlm_serve.deploy.replica_pool import ReplicaCall, ReplicaPool
from vlm_serve.deploy.shared_state import SharedState
from vlm_serve.routing.view import RequestUsage
from vlm_serve.server.failover.attempt import USAGE, Attempt


@dataclass
class Handle:
    """Takes calls, which never end by themselves."""

    numbers: list[int] = field(default_factory=list)
    answer: Any = None

    def __post_init__(self) -> None:
        self.answer = self

    def remote(self, gateway: str, number: int, *_: Any, **__: Any) -> Any:
        self.numbers.append(number)
        return asyncio.get_running_loop().create_future()


def counts(prompt: int, cached: int, answer: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": answer}


def message(*usage: dict[str, int] | None) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"x"} | ({USAGE: usage} if usage else {})


def state_after(
    monkeypatch: pytest.MonkeyPatch, call: ReplicaCall, *messages: dict[str, Any] | None
) -> SharedState:
    """What the shared state knows once an answer of these messages is over."""
    state = SharedState()
    monkeypatch.setattr(replica_pool, "SHARED_STATE", state)

    async def work() -> None:
        handle = Handle()
        pool = ReplicaPool(cast("DeploymentHandle[Any]", handle), 10.0)

        async def read() -> None:
            async for _ in pool.answers(call):
                assert state.routed, "it is not over yet"

        reading = asyncio.ensure_future(read())
        while not handle.numbers:
            await asyncio.sleep(0)
        state.routed[handle.numbers[0]] = "a"
        pool._deliver("a", [(handle.numbers[0], each) for each in messages])
        await reading

    asyncio.run(work())
    assert not state.routed
    return state


def test_what_a_request_took_is_in_the_shared_state(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = (
        message(counts(100, 64, 1), None),
        message(),
        message(counts(100, 64, 9), counts(10, 0, 2)),
        message(),
    )
    state = state_after(monkeypatch, ReplicaCall({}, b""), *messages, None)
    assert list(state.usage.values()) == [RequestUsage(110, 64, 11)]


def test_what_nobody_counted_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not state_after(monkeypatch, ReplicaCall({}, b""), message(), None).usage
    again = replace(Attempt.first("id"), resumed=1)
    call = ReplicaCall({}, b"", attempt=again)
    assert not state_after(monkeypatch, call, message(counts(9, 0, 1)), None).usage, (
        "of another replica"
    )
