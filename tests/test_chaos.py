"""A server and everything around it, while processes die, files are cut and clocks jump."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import chaos_load
import httpx
import jumping_clock
import pytest
from chaos import run
from chaos_deeds import DEEDS, RANK_KILLED, STORE, together
from chaos_load import Judge, Question
from chaos_world import State, random_setup

QUESTION = Question("it", "/v1/completions", {"prompt": "x"})
SECONDS = 60.0


@pytest.mark.fuzz
def test_nothing_that_breaks_makes_an_answer_wrong_or_late() -> None:
    pytest.importorskip("redis")
    lines: list[str] = []
    report = run(int(os.environ.get("CHAOS_SEED", "0")), SECONDS, say=lines.append)
    assert report.wrong == [], "\n".join(lines)
    assert report.right > 20 and len(report.deeds) > 3


def judged(
    judge: Judge, answer: Callable[[httpx.Request], httpx.Response], *, stream: bool
) -> bool:
    transport = httpx.MockTransport(answer)
    with httpx.Client(transport=transport, base_url="http://here") as client:
        return judge.ask(client, QUESTION, stream=stream)


def given(answer: httpx.Response, _: httpx.Request) -> httpx.Response:
    return answer


def completion(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}


def events(*chunks: dict[str, Any], done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(each)}\n\n" for each in chunks]
    return httpx.Response(200, text="".join(lines) + ("data: [DONE]\n\n" if done else ""))


def test_a_judge_knows_right_answers_errors_and_wrong_ones() -> None:
    judge = Judge()
    assert judged(judge, lambda _: httpx.Response(200, json=completion("red")), stream=False)
    half = completion("re")
    half["choices"][0]["finish_reason"] = None
    assert judged(judge, lambda _: events(half, completion("d")), stream=True)
    for broken in (
        httpx.Response(503, json={}),
        events(half, done=False),
        events(half, {"error": {"message": "gone"}}),
    ):
        assert not judged(judge, partial(given, broken), stream=True)
    assert (judge.right, judge.errors.total(), judge.wrong) == (2, 3, [])
    assert not judged(judge, lambda _: events(half), stream=True)
    assert not judged(judge, lambda _: httpx.Response(200, json=completion("blue")), stream=False)
    assert len(judge.wrong) == 2


def test_a_judge_minds_a_refusal_unless_a_stored_answer_is_gone() -> None:
    judge = Judge()
    refusal = partial(given, httpx.Response(404, text="not found"))
    assert not judged(judge, refusal, stream=False)
    assert judge.wrong == ["it: 404 not found"]
    texts = {"a": "red", "b": "blue"}

    def stored(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        if asked.get("previous_response_id") not in (None, "id a"):
            return httpx.Response(404, text="gone")
        word = asked["input"]
        part = {"type": "output_text", "text": texts[word]}
        body = {"id": f"id {word}", "status": "completed", "output": [{"content": [part]}]}
        return httpx.Response(200, json=body)

    judge, turns = Judge(), Question("two", "/v1/responses", {"input": "a"}, {"input": "b"})
    for expected in (True, True, False):
        transport = httpx.MockTransport(stored)
        with httpx.Client(transport=transport, base_url="http://here") as client:
            assert judge.ask(client, turns, stream=True) is expected
        texts["b"] = "green" if judge.right == 2 else "blue"
    assert len(judge.wrong) == 1
    lost = replace(turns, body={"input": "b"})
    with httpx.Client(transport=httpx.MockTransport(stored), base_url="http://here") as client:
        assert not judge.ask(client, lost, stream=False)
    assert judge.errors == {"404": 1} and len(judge.wrong) == 1


def test_a_judge_minds_an_answer_that_never_comes() -> None:
    judge = Judge()

    def late(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("late", request=request)

    assert not judged(judge, late, stream=False)
    assert judge.wrong == [f"it: ReadTimeout after {chaos_load.HANG_SECONDS:.0f} s"]


def test_what_is_left_over_is_noticed() -> None:
    before = State(threads=20, files=50, memory=1 << 29, processes=3, folders=("a",))
    assert list(before.grown(before)) == []
    more = replace(before, processes=30, memory=1 << 31, folders=tuple("abcde"))
    assert [each.split(":")[0] for each in more.grown(before)] == [
        *("processes", "memory", "temporary folders")
    ]


def test_configurations_follow_from_the_seed() -> None:
    made = [random_setup(random.Random(f"{seed} 0"), replicas=False) for seed in range(40)]
    assert made == [random_setup(random.Random(f"{seed} 0"), replicas=False) for seed in range(40)]
    assert {each.ranks for each in made} == {1, 2} and {each.replicas for each in made} == {0}
    assert {each.speculative for each in made} == {"off", "suffix", "auto"}
    assert {each.responses for each in made} == {False, True}
    assert len({each.clients for each in made}) > 1


def test_no_two_deeds_at_a_time_need_the_same_store() -> None:
    of_store = [deed for deed in DEEDS if deed.name in STORE]
    assert len(of_store) == len(STORE)
    clock = next(deed for deed in DEEDS if deed.name == "the clock jumps")
    killed = next(deed for deed in DEEDS if deed.name == RANK_KILLED)
    assert together(of_store[0], clock)
    assert not together(of_store[0], of_store[1]) and not together(clock, killed)


def test_the_clock_jumps_while_its_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        time = staticmethod(lambda: 100.0)
        time_ns = staticmethod(lambda: 100_000_000_000)

    monkeypatch.setattr(jumping_clock, "time", Clock)
    file = tmp_path / "clock"
    jumping_clock.install(file)
    assert Clock.time() == 100.0
    file.write_text("-60")
    assert (Clock.time(), Clock.time_ns()) == (40.0, 40_000_000_000)
