"""What is thought of drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from vlm_serve.engine.features.drafts.base import MAX_EVIDENCE
from vlm_serve.engine.features.drafts.lengths import Acceptance, AcceptanceTracker
from vlm_serve.engine.requests.sequence import Sequence

WEAK, STRONG = 0, MAX_EVIDENCE


def sequence(number: int, tenant: bytes = b"") -> Sequence:
    keys = SimpleNamespace(owners=SimpleNamespace(prompt=tenant))
    return cast(Sequence, SimpleNamespace(number=number, keys=keys))


def test_trust_follows_what_became_of_drafts() -> None:
    acceptance = Acceptance()
    for _ in range(10):
        acceptance.learn(7, 7)
    assert min(acceptance.rates[:7]) > 0.8 and acceptance.rates[7] == 0.7
    for _ in range(10):
        acceptance.learn(7, 0)
    assert acceptance.rates[0] < 0.15 and min(acceptance.rates[1:7]) > 0.8


def test_what_drafts_promise() -> None:
    acceptance = Acceptance([0.5, 0.5, 0.5, *[0.9] * 5])
    assert acceptance.expected_accepted(0) == 0.0
    assert acceptance.expected_accepted(3) == pytest.approx(0.875)
    assert acceptance.chances(3, 2) == pytest.approx([0.5, 0.45, 0.405])
    assert acceptance.expected_accepted(9, STRONG) == pytest.approx(9 * (1 - 0.9**9))


def test_weak_evidence_that_fails_says_nothing_about_strong() -> None:
    tracker, one = AcceptanceTracker(), sequence(0)
    for _ in range(10):
        tracker.learn(one, 0, STRONG, 7, 7)
        tracker.learn(one, 0, WEAK, 3, 0)
    acceptance = tracker.of(one, 0)
    assert acceptance.rates[WEAK] < 0.15 and acceptance.rates[STRONG] > 0.95


def test_a_new_sequence_begins_with_what_became_of_its_tenants_drafts() -> None:
    tracker = AcceptanceTracker()
    for number in range(40):
        one = sequence(number, b"tenant")
        for _ in range(5):
            tracker.learn(one, 0, WEAK, 2, 0)
        assert tracker.of(one, 0).pause == 256
        tracker.forget(one)
    new = tracker.of(sequence(40, b"tenant"), 0)
    assert new.rates[WEAK] < 0.05 and new.rates[1:] == Acceptance().rates[1:]
    assert new.pause == Acceptance().pause
    assert tracker.of(sequence(40, b"tenant"), 1) == Acceptance()
    assert tracker.of(sequence(41, b"another"), 0) == Acceptance()


def test_one_sequence_does_not_decide_for_its_tenant() -> None:
    tracker, one = AcceptanceTracker(), sequence(0)
    for _ in range(5):
        tracker.learn(one, 0, WEAK, 2, 0)
    assert tracker.of(one, 0).rates[WEAK] < 0.3 < 0.6 < tracker.of(sequence(1), 0).rates[WEAK]


def test_only_so_many_tenants_are_remembered() -> None:
    tracker = AcceptanceTracker()
    for number in range(3000):
        tracker.learn(sequence(number, number.to_bytes(2, "big")), 0, WEAK, 2, 0)
        tracker.forget(sequence(number))
    assert len(tracker._common) == 1024 and not tracker._by_sequence
