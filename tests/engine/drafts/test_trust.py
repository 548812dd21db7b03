"""What is thought of drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from vlm_serve.engine.drafts.trust import Source, Trust, Trusts
from vlm_serve.engine.sequence import Sequence

WEAK, STRONG = Source(sure=False), Source(sure=True)


def sequence(number: int, tenant: bytes = b"") -> Sequence:
    return cast(Sequence, SimpleNamespace(number=number, keys=SimpleNamespace(root=tenant)))


def test_trust_follows_what_became_of_drafts() -> None:
    trust = Trust()
    for _ in range(10):
        trust.learn(7, 7)
    assert trust.rate > 0.95
    for _ in range(10):
        trust.learn(7, 0)
    assert trust.rate < 0.15


def test_what_drafts_promise() -> None:
    assert Trust(rate=0.5).promise(0) == 0.0
    assert Trust(rate=0.5).promise(3) == pytest.approx(0.875)


def test_weak_evidence_that_fails_says_nothing_about_strong() -> None:
    trusts, one = Trusts(), sequence(0)
    for _ in range(10):
        trusts.learn(one, WEAK, 3, 0)
        trusts.learn(one, STRONG, 7, 7)
    assert trusts.of(one, WEAK).rate < 0.15 and trusts.of(one, STRONG).rate > 0.95
    assert trusts.of(one, WEAK).pause == 256


def test_a_new_sequence_begins_with_what_became_of_its_tenants_drafts() -> None:
    trusts = Trusts()
    for number in range(40):
        one = sequence(number, b"tenant")
        for _ in range(5):
            trusts.learn(one, WEAK, 2, 0)
        trusts.forget(one)
    new = trusts.of(sequence(40, b"tenant"), WEAK)
    assert new.rate < 0.05 and new.pause == Trust().pause
    assert trusts.of(sequence(40, b"tenant"), STRONG) == Trust()
    assert trusts.of(sequence(41, b"another"), WEAK) == Trust()


def test_one_sequence_does_not_decide_for_its_tenant() -> None:
    trusts, one = Trusts(), sequence(0)
    for _ in range(5):
        trusts.learn(one, WEAK, 2, 0)
    assert trusts.of(one, WEAK).rate < 0.3 < 0.6 < trusts.of(sequence(1), WEAK).rate


def test_only_so_many_tenants_are_remembered() -> None:
    trusts = Trusts()
    for number in range(3000):
        trusts.learn(sequence(number, number.to_bytes(2, "big")), WEAK, 2, 0)
        trusts.forget(sequence(number))
    assert len(trusts._common) == 1024 and not trusts._own
