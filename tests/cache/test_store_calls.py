"""The breaker between the tiers and a store."""

from __future__ import annotations

from vlm_serve.cache.tiers.store_calls import Breaker


def test_it_opens_on_a_failure_and_one_call_decides_when_it_has_rested() -> None:
    breaker = Breaker(10.0)
    assert breaker.admit(0.0) == "call"
    assert breaker.ended("call", 1.0, failed=True)
    assert breaker.admit(10.9) is None
    assert breaker.admit(11.0) == "probe"
    assert breaker.admit(11.0) is None, "one call alone"
    assert not breaker.ended("probe", 12.0, failed=False)
    assert breaker.admit(12.0) == "call"


def test_the_rest_doubles_while_the_store_does_not_come_back() -> None:
    breaker, now = Breaker(10.0), 0.0
    assert breaker.admit(now) == "call" and breaker.ended("call", now, failed=True)
    for rest in (10.0, 20.0, 40.0, 80.0, 80.0):
        assert breaker.admit(now + rest - 0.1) is None
        now += rest
        assert breaker.admit(now) == "probe" and breaker.ended("probe", now, failed=True)
    assert breaker.admit(now + 80.0) == "probe"
    breaker.ended("probe", now + 80.0, failed=False)
    assert breaker.admit(now + 81.0) == "call" and breaker.ended("call", now + 81.0, failed=True)
    assert breaker.admit(now + 91.0) == "probe", "the first rest again"


def test_it_opens_on_slow_calls_in_a_row() -> None:
    breaker = Breaker(10.0)
    for slow in (True, True, False, True, True):
        assert breaker.admit(0.0) == "call"
        assert not breaker.ended("call", 0.0, failed=False, slow=slow)
    assert breaker.ended("call", 0.0, failed=False, slow=True)
    assert breaker.admit(10.0) == "probe"
    assert breaker.ended("probe", 11.0, failed=False, slow=True), "it is slow still"


def test_calls_that_began_before_change_nothing() -> None:
    breaker = Breaker(10.0)
    first, second, third = (breaker.admit(0.0) for _ in range(3))
    assert first == second == third == "call"
    assert breaker.ended("call", 1.0, failed=True)
    assert not breaker.ended("call", 5.0, failed=True)
    assert not breaker.ended("call", 6.0, failed=False)
    assert breaker.admit(10.9) is None and breaker.admit(11.0) == "probe"
