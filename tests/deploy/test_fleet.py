"""What the front's view of its replicas tells their routers, without a cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from ray.serve.handle import DeploymentHandle

from vlm_serve.deploy import fleet
from vlm_serve.deploy.board import Board
from vlm_serve.deploy.fleet import Call, Fleet
from vlm_serve.routing.view import Spent
from vlm_serve.server.failover.attempt import USAGE, Attempt


@dataclass
class Handle:
    """Takes calls, which never end by themselves."""

    numbers: list[int] = field(default_factory=list)
    answer: Any = None

    def __post_init__(self) -> None:
        self.answer = self

    def remote(self, front: str, number: int, *_: Any, **__: Any) -> Any:
        self.numbers.append(number)
        return asyncio.get_running_loop().create_future()


def counts(prompt: int, cached: int, answer: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": answer}


def letter(*usage: dict[str, int] | None) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"x"} | ({USAGE: usage} if usage else {})


def told(monkeypatch: pytest.MonkeyPatch, call: Call, *letters: dict[str, Any] | None) -> Board:
    """What the board knows once an answer of these letters is over."""
    known = Board()
    monkeypatch.setattr(fleet, "BOARD", known)

    async def work() -> None:
        handle = Handle()
        fleets = Fleet(cast("DeploymentHandle[Any]", handle), 10.0)

        async def read() -> None:
            async for _ in fleets.answers(call):
                assert known.routed, "it is not over yet"

        reading = asyncio.ensure_future(read())
        while not handle.numbers:
            await asyncio.sleep(0)
        known.routed[handle.numbers[0]] = "a"
        fleets._deliver("a", [(handle.numbers[0], each) for each in letters])
        await reading

    asyncio.run(work())
    assert not known.routed
    return known


def test_what_a_request_took_is_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = (
        letter(counts(100, 64, 1), None),
        letter(),
        letter(counts(100, 64, 9), counts(10, 0, 2)),
        letter(),
    )
    known = told(monkeypatch, Call({}, b""), *letters, None)
    assert list(known.spent.values()) == [Spent(110, 64, 11)]


def test_what_nobody_counted_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not told(monkeypatch, Call({}, b""), letter(), None).spent
    again = replace(Attempt.first("id"), resumed=1)
    call = Call({}, b"", attempt=again)
    assert not told(monkeypatch, call, letter(counts(9, 0, 1)), None).spent, "of another replica"
