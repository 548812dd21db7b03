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
from chaos import ENDS, PROMISES, Report, Run, result, shown
from chaos_deeds import DEEDS, RANK_KILLED, STORE, together
from chaos_load import IN_TIME, RIGHT, Broken, Judge, Question
from chaos_plan import Plan, plan_of
from chaos_world import State, World, random_setup
from memory_ledger import Ledger

QUESTION = Question("it", "/v1/completions", {"prompt": "x"})
MOST_DEEDS = 8
FATAL = {deed.name for deed in DEEDS if deed.fatal}


@pytest.mark.fuzz
def test_nothing_that_breaks_makes_an_answer_wrong_or_late() -> None:
    """It ends after so many deeds: how long they take is the machine's business."""
    pytest.importorskip("redis")
    seed, lines = int(os.environ.get("CHAOS_SEED", "0")), list[str]()
    report = Run(seed, most_deeds=MOST_DEEDS, say=lines.append).run()
    assert report.broken == [], "\n".join(lines)
    assert shown(report) and report.deeds.total() >= MOST_DEEDS, "\n".join(lines)


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
    assert (judge.right, judge.errors.total(), judge.broken) == (2, 3, [])
    assert not judged(judge, lambda _: events(half), stream=True)
    assert not judged(judge, lambda _: httpx.Response(200, json=completion("blue")), stream=False)
    assert [each.promise for each in judge.broken] == [RIGHT, RIGHT]


def test_a_judge_minds_a_refusal_unless_a_stored_answer_is_gone() -> None:
    judge = Judge()
    refusal = partial(given, httpx.Response(404, text="not found"))
    assert not judged(judge, refusal, stream=False)
    assert judge.broken == [Broken(RIGHT, "it: 404 not found")]
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
    assert len(judge.broken) == 1
    lost = replace(turns, body={"input": "b"})
    with httpx.Client(transport=httpx.MockTransport(stored), base_url="http://here") as client:
        assert not judge.ask(client, lost, stream=False)
    assert judge.errors == {"404": 1} and len(judge.broken) == 1


def test_a_judge_minds_an_answer_that_never_comes() -> None:
    judge = Judge()

    def late(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("late", request=request)

    assert not judged(judge, late, stream=False)
    what = f"it: ReadTimeout after {chaos_load.HANG_SECONDS:.0f} s"
    assert judge.broken == [Broken(IN_TIME, what)]


def test_what_is_left_over_is_noticed() -> None:
    before = State(threads=20, files=50, memory=1 << 29, processes=3, folders=("a",))
    assert list(before.grown(before)) == [] == list(before.unexplained(before))
    more = replace(before, processes=30, memory=1 << 31, folders=tuple("abcde"))
    assert [each.split(":")[0] for each in more.grown(before)] == ["processes", "temporary folders"]
    assert [each.split(":")[0] for each in more.unexplained(before)] == ["memory"]
    named = replace(more, ledger=Ledger(1 << 31, 0, {"kv": 3 << 29}))
    idle = replace(before, ledger=Ledger(1 << 29, 0, {"kv": 0}))
    assert list(named.unexplained(idle)) == []
    assert list(replace(more, ledger=Ledger(1 << 31, 0, {"kv": 0})).unexplained(idle))


def test_configurations_follow_from_the_seed() -> None:
    made = [random_setup(random.Random(f"{seed} 0"), replicas=False) for seed in range(40)]
    assert made == [random_setup(random.Random(f"{seed} 0"), replicas=False) for seed in range(40)]
    assert {each.ranks for each in made} == {1, 2} and {each.replicas for each in made} == {0}
    assert {each.speculative for each in made} == {"off", "suffix", "auto"}
    assert {each.responses for each in made} == {False, True}
    assert len({each.clients for each in made}) > 1


def names(plan: Plan) -> list[str]:
    return [deed.name for act in plan.acts for deed in act.deeds]


def test_a_seed_plans_everything_before_anything_is_started() -> None:
    plans = {seed: plan_of(seed, 2, adapter=True) for seed in range(30)}
    for seed, plan in plans.items():
        again = plan_of(seed, 2, adapter=True)
        assert again == plan
        act = plan.acts[0]
        draws = [each.chance(act.deeds[0]).random() for each in (act, again.acts[0])]
        assert draws[0] == draws[1] != plan.acts[1].chance(act.deeds[0]).random()
        assert len(set(names(plan))) == len(names(plan))
        assert all(deed.possible(plan.setup) for act in plan.acts for deed in act.deeds)
        assert all(len(act.pauses) == len(act.deeds) + 1 for act in plan.acts)
        assert not any(act.fatal for act in plan.acts[:-1])
    assert len({tuple(names(plan)) for plan in plans.values()}) == len(plans)
    assert {plan.acts[-1].fatal for plan in plans.values()} == {False, True}
    assert plan_of(1, 0).acts != plan_of(1, 1).acts


def test_what_is_missing_leaves_the_order_of_the_other_deeds() -> None:
    """Without an adapter: the draws of the configuration are the same, and so is the order."""
    for seed in range(20):
        there, absent = plan_of(seed, 0, adapter=True), plan_of(seed, 0)
        assert absent.setup == replace(there.setup, adapter=False)
        lost = "files of the adapter are damaged"
        kept = [deed for deed in names(there) if deed != lost and deed not in FATAL]
        assert kept == [deed for deed in names(absent) if deed not in FATAL]


def test_a_report_tells_which_promise_was_broken() -> None:
    report = Report(right=5, rounds=1)
    report.deeds["the clock jumps"] += 2
    lines = list(result(report))
    assert "    2 times: the clock jumps" in lines and "injected: 2 deeds" in lines
    assert [line.split()[1].strip(":") for line in lines if line.startswith("kept")] == [
        word.split()[0] for word in PROMISES
    ]
    report.broken.append(Broken(ENDS, "round 0: the server ended with 1"))
    lines = list(result(report))
    at = next(index for index, line in enumerate(lines) if line.startswith("BROKEN"))
    assert lines[at].startswith(f"BROKEN {ENDS}") and "ended with 1" in lines[at + 1]
    assert shown(report) and not shown(Report(right=5)) and not shown(Report(deeds=report.deeds))
    assert "NOTHING SHOWN" in list(result(Report(right=5)))[-1]


def test_a_deed_tells_what_it_found(tmp_path: Path) -> None:
    setup = replace(random_setup(random.Random(0), replicas=False), tiers=("disk",), adapter=False)
    world, notes = World(tmp_path, setup, None), list[str]()
    world.note = notes.append
    (world.disk / "entries").write_bytes(b"x" * 100)
    deeds = {deed.name: deed for deed in DEEDS}
    for name in ("the clock jumps", "files of the disk tier are damaged"):
        with deeds[name].act(world, random.Random(1)):
            assert notes
    assert notes[0].startswith("by ") and notes[1].startswith("entries: ")
    assert not world.clock.exists()


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
