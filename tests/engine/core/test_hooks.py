"""Hooks call a feature while a request concerns it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vlm_serve.engine.core.hooks import Hooks


class _Feature:
    """Concerns requests that are marked, and waits for another thread as long as it is told."""

    def __init__(self) -> None:
        self.busy = False
        self.rooms = list[int]()

    def is_busy(self) -> bool:
        return self.busy

    def plan_open(self, room: int) -> int:
        self.rooms.append(room)
        return 0

    def may_prefill(self, sequence: Any, budget: int) -> int:
        return budget // 2

    def report_last(self, sequence: Any, delta: Any) -> Any:
        return [*delta, sequence.number]

    def may_follow(self, sequence: Any, leader: Any, match: Any) -> bool:
        return False


def _group(number: int, *, marked: bool) -> Any:
    request = SimpleNamespace(marked=marked)
    sequence = SimpleNamespace(number=number, request=request)
    return SimpleNamespace(request=request, sequences=[sequence])


def _plan(hooks: Hooks, room: int) -> None:
    for offer in hooks.plan_open[:]:
        offer(room)


def test_steps_are_offered_while_a_request_concerns_a_feature_or_it_waits() -> None:
    hooks, feature = Hooks(), _Feature()
    hooks.add(feature, concerns=lambda request: request.marked)  # type: ignore[attr-defined]
    other, marked = _group(0, marked=False), _group(1, marked=True)
    for notice in hooks.on_added:
        notice(other)
    _plan(hooks, 1)
    assert not hooks.plan_open
    for notice in hooks.on_added:
        notice(marked)
    _plan(hooks, 2)
    feature.busy = True  # the request ends, and what it asked for is still on its way
    for ended in hooks.on_ended:
        ended(marked.sequences[0])
    _plan(hooks, 3)
    _plan(hooks, 4)
    assert feature.rooms == [2, 3, 4], "what has come would never be taken in"
    feature.busy = False
    _plan(hooks, 5)
    assert not hooks.plan_open


def test_a_request_that_does_not_concern_a_feature_passes_unchanged() -> None:
    hooks = Hooks()
    hooks.add(_Feature(), concerns=lambda request: request.marked)  # type: ignore[attr-defined]
    (other,), (marked,) = (_group(number, marked=bool(number)).sequences for number in (0, 1))
    (prefill,), (report,), (follow,) = hooks.may_prefill, hooks.report_last, hooks.may_follow
    assert (prefill(other, 9), prefill(marked, 9)) == (9, 4)
    delta: Any = []
    kept: Any = report(other, delta)
    added: Any = report(marked, delta)
    assert kept == [] and added == [1]
    match: Any = None
    assert follow(other, marked, match) and not follow(marked, other, match)
