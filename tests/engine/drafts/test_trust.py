"""What is thought of drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from vlm_serve.engine.drafts.base import MOST_EVIDENCE
from vlm_serve.engine.drafts.trust import Trust, Trusts
from vlm_serve.engine.sequence import Sequence

WEAK, STRONG = 0, MOST_EVIDENCE


def sequence(number: int, tenant: bytes = b"") -> Sequence:
    return cast(Sequence, SimpleNamespace(number=number, keys=SimpleNamespace(root=tenant)))


def test_trust_follows_what_became_of_drafts() -> None:
    trust = Trust()
    for _ in range(10):
        trust.learn(7, 7)
    assert min(trust.rates[:7]) > 0.8 and trust.rates[7] == 0.7
    for _ in range(10):
        trust.learn(7, 0)
    assert trust.rates[0] < 0.15 and min(trust.rates[1:7]) > 0.8


def test_what_drafts_promise() -> None:
    trust = Trust([0.5, 0.5, 0.5, *[0.9] * 5])
    assert trust.promise(0) == 0.0
    assert trust.promise(3) == pytest.approx(0.875)
    assert trust.chances(3, 2) == pytest.approx([0.5, 0.45, 0.405])
    assert trust.promise(9, STRONG) == pytest.approx(9 * (1 - 0.9**9))


def test_weak_evidence_that_fails_says_nothing_about_strong() -> None:
    trusts, one = Trusts(), sequence(0)
    for _ in range(10):
        trusts.learn(one, 0, STRONG, 7, 7)
        trusts.learn(one, 0, WEAK, 3, 0)
    trust = trusts.of(one, 0)
    assert trust.rates[WEAK] < 0.15 and trust.rates[STRONG] > 0.95


def test_a_new_sequence_begins_with_what_became_of_its_tenants_drafts() -> None:
    trusts = Trusts()
    for number in range(40):
        one = sequence(number, b"tenant")
        for _ in range(5):
            trusts.learn(one, 0, WEAK, 2, 0)
        assert trusts.of(one, 0).pause == 256
        trusts.forget(one)
    new = trusts.of(sequence(40, b"tenant"), 0)
    assert new.rates[WEAK] < 0.05 and new.rates[1:] == Trust().rates[1:]
    assert new.pause == Trust().pause
    assert trusts.of(sequence(40, b"tenant"), 1) == Trust()
    assert trusts.of(sequence(41, b"another"), 0) == Trust()


def test_one_sequence_does_not_decide_for_its_tenant() -> None:
    trusts, one = Trusts(), sequence(0)
    for _ in range(5):
        trusts.learn(one, 0, WEAK, 2, 0)
    assert trusts.of(one, 0).rates[WEAK] < 0.3 < 0.6 < trusts.of(sequence(1), 0).rates[WEAK]


def test_only_so_many_tenants_are_remembered() -> None:
    trusts = Trusts()
    for number in range(3000):
        trusts.learn(sequence(number, number.to_bytes(2, "big")), 0, WEAK, 2, 0)
        trusts.forget(sequence(number))
    assert len(trusts._common) == 1024 and not trusts._own
