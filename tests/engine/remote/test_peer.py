"""Two processes that tell and ask each other things, here as two threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from waiting import WAIT_SECONDS, wait_for

from vlm_serve.engine.remote.peer import Peer
from vlm_serve.errors import EngineClosedError, EngineError, FieldError
from vlm_serve.system.wire import Wire


@contextmanager
def peers() -> Iterator[tuple[Peer, Peer, list[Any]]]:
    """Two sides, and what the second one has been told, with a mark behind each batch."""
    left, right = (Peer(Wire(each.detach())) for each in socket.socketpair())
    heard: list[Any] = []
    right.told["say"] = heard.append
    threads = [
        threading.Thread(target=left.receive),
        threading.Thread(target=right.receive, args=(lambda: heard.append("|"),)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield left, right, heard
    finally:
        left.close()
        right.close()
        for thread in threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()


def test_what_has_gathered_is_one_batch_in_its_order() -> None:
    with peers() as (left, _, heard):
        for number in range(5):
            left.add("say", number)
        left.flush()
        wait_for(lambda: heard == [0, 1, 2, 3, 4, "|"])


def test_many_ask_at_once_and_each_gets_its_own_answer() -> None:
    with peers() as (left, right, _):
        right.asked["twice"] = lambda number: 2 * number
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(lambda n: left.ask("twice", n), range(200))] == [*range(0, 400, 2)]


def test_who_is_asked_may_ask_back() -> None:
    with peers() as (left, right, _):
        left.asked["name"] = lambda: "left"
        right.asked["greet"] = lambda: f"hello, {right.ask('name')}"
        assert left.ask("greet") == "hello, left"


def test_errors_are_those_of_the_other_side() -> None:
    class OnlyHereError(Exception):
        pass

    def refuse(kind: str) -> None:
        if kind == "known":
            raise FieldError("top_p", "must be small", code="big")
        raise OnlyHereError("odd") if kind == "local" else AssertionError("a violated invariant")

    with peers() as (left, right, _):
        right.asked["refuse"] = refuse
        with pytest.raises(FieldError, match="top_p must be small") as refused:
            left.ask("refuse", "known")
        assert (refused.value.param, refused.value.code) == ("top_p", "big")
        with pytest.raises(AssertionError, match="a violated invariant"):
            left.ask("refuse", "assertion")
        with pytest.raises(EngineError, match="OnlyHereError: odd"):
            left.ask("refuse", "local")
        right.asked["fine"] = lambda: 1
        assert left.ask("fine") == 1, "an error ends nothing"


def test_who_waits_for_a_side_that_goes_is_told() -> None:
    asked, go = threading.Event(), threading.Event()

    def stall() -> None:
        asked.set()
        go.wait(WAIT_SECONDS)

    with peers() as (left, right, heard), ThreadPoolExecutor(1) as pool:
        right.asked["stall"] = stall
        answer = pool.submit(left.ask, "stall")
        assert asked.wait(WAIT_SECONDS)
        right.close()
        with pytest.raises(EngineClosedError):
            answer.result(WAIT_SECONDS)
        with pytest.raises(EngineClosedError):
            left.ask("stall")
        left.tell("say", "too late")
        go.set()
    assert "too late" not in heard


def test_what_cannot_be_sent_ends_the_connection_and_not_in_silence() -> None:
    with peers() as (left, _, __):
        left.tell("say", threading.Lock())
        with pytest.raises(EngineClosedError):
            left.ask("anything")
