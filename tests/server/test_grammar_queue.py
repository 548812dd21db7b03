"""Turns at the grammar compiler: nobody keeps others from theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vlm_serve.errors import EngineClosedError, OverloadedError, VlmServeError
from vlm_serve.server.grammar_queue import MAX_QUEUED_GRAMMARS, GrammarQueue
from vlm_serve.structured_outputs import StructuredOutputs

ALICE, BOB = b"alice", b"bob"


class Grammars:
    """A compiler that works only when it is let."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.go = threading.Semaphore(0)

    def find(self, form: StructuredOutputs, after: bytes, owner: bytes) -> Any:
        return None

    def compile(self, form: StructuredOutputs, after: bytes, owner: bytes) -> Any:
        assert self.go.acquire(timeout=60)
        self.done.append(str(form.regex))
        return form.regex


class Engine:
    def __init__(self) -> None:
        self.grammars = Grammars()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


Work = Callable[[GrammarQueue, Grammars], Coroutine[Any, Any, None]]


def run(pool: ThreadPoolExecutor, work: Work) -> Grammars:
    engine: Any = Engine()
    asyncio.run(work(GrammarQueue(engine, pool), engine.grammars))
    grammars: Grammars = engine.grammars
    return grammars


def asked(queue: GrammarQueue, text: str, share: bytes) -> asyncio.Task[Any]:
    return asyncio.ensure_future(queue.compile(StructuredOutputs(regex=text), b"", b"", share))


@pytest.mark.parametrize("fault", [OverloadedError("it did not start"), EngineClosedError("end")])
def test_a_start_that_the_end_meets_is_one_line_of_the_log(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, fault: VlmServeError
) -> None:
    """A replica that is told to end while it begins: its compiler may be killed before it."""

    async def work(queue: GrammarQueue, grammars: Any) -> None:
        def ended() -> None:
            raise fault

        grammars.warm = ended
        queue.warm_up()

    run(pool, work)
    pool.shutdown(wait=True)
    assert [record.exc_info for record in caplog.records] == [None] * (fault.message != "end")


def test_keys_take_turns_and_each_has_its_own_limit(pool: ThreadPoolExecutor) -> None:
    async def work(queue: GrammarQueue, grammars: Grammars) -> None:
        hers = [asked(queue, f"a{n}", ALICE) for n in range(MAX_QUEUED_GRAMMARS + 2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="of this key"):
            await hers.pop()
        his = [asked(queue, f"b{n}", BOB) for n in range(3)]
        await asyncio.sleep(0)
        for _ in range(len(hers) + len(his)):
            grammars.go.release()
        await asyncio.gather(*hers, *his)

    done = run(pool, work).done
    assert done[:7] == ["a0", "a1", "b0", "a2", "b1", "a3", "b2"]
    assert len(done) == MAX_QUEUED_GRAMMARS + 1 + 3


def test_who_leaves_gives_the_turn_on(pool: ThreadPoolExecutor) -> None:
    """Whether it waits, has just got its turn, or is being compiled, which is finished first."""

    async def work(queue: GrammarQueue, grammars: Grammars) -> None:
        compiled, waiting = asked(queue, "first", ALICE), asked(queue, "left", ALICE)
        last, other = asked(queue, "second", ALICE), asked(queue, "third", BOB)
        await asyncio.sleep(0.05)
        compiled.cancel()
        waiting.cancel()
        await asyncio.gather(compiled, waiting, return_exceptions=True)
        assert not grammars.done
        for _ in range(2):
            grammars.go.release()
        assert await last == "second"
        turn = asked(queue, "never", BOB)
        grammars.go.release()
        assert await other == "third"
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        for _ in range(2):  # "never" may be compiled already.
            grammars.go.release()
        assert await asyncio.wait_for(asked(queue, "end", BOB), 60) == "end"
        assert not queue._waiting

    assert run(pool, work).done[:3] == ["first", "second", "third"]


def test_what_cannot_be_compiled_gives_the_turn_on(pool: ThreadPoolExecutor) -> None:
    async def work(queue: GrammarQueue, grammars: Grammars) -> None:
        def fail(*given: Any) -> Any:
            raise ValueError("bad")

        compile_ = grammars.compile
        grammars.compile = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(ValueError, match="bad"):
            await asked(queue, "a", ALICE)
        grammars.compile = compile_  # type: ignore[method-assign]
        grammars.go.release()
        assert await asyncio.wait_for(asked(queue, "b", BOB), 60) == "b"

    run(pool, work)
