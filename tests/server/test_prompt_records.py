"""Records of earlier prompts: bounded in number and age, and each owner's own."""

from __future__ import annotations

from vlm_serve.preprocess.identity.prompt_parts import PromptParts
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.server.http.auth import Owner
from vlm_serve.server.prompt_records import (
    KEPT_SECONDS,
    MAX_RECORDS,
    PromptRecords,
)

PARTS = PromptParts.of(Conversation([{"role": "user", "content": "hi"}]), "").kept()
ALICE, BOB, SALTED = Owner(b"alice", ""), Owner(b"bob", ""), Owner(b"alice", "salt")


def test_a_record_is_its_owners_alone() -> None:
    records = PromptRecords()
    records.put(ALICE, "a", PARTS, 5)
    found = records.find(ALICE, "a")
    assert found is not None and (found.parts, found.reusable) == (PARTS, 5)
    assert records.find(BOB, "a") is records.find(SALTED, "a") is records.find(ALICE, "b") is None
    records.clear()
    assert records.find(ALICE, "a") is None


def test_the_oldest_are_dropped_and_nobody_elses() -> None:
    records = PromptRecords()
    records.put(BOB, "b", PARTS, 0)
    for number in range(MAX_RECORDS):
        records.put(ALICE, str(number), PARTS, number)
    records.put(ALICE, "0", PARTS, 7)  # told again: it is the newest now
    records.put(ALICE, "one more", PARTS, 0)
    assert records.find(ALICE, "1") is None
    again = records.find(ALICE, "0")
    assert again is not None and again.reusable == 7
    assert records.find(ALICE, "2") and records.find(ALICE, "one more") and records.find(BOB, "b")


def test_they_end_on_time_without_traffic() -> None:
    now = [0.0]
    records = PromptRecords(lambda: now[0])
    records.put(ALICE, "a", PARTS, 0)
    now[0] = KEPT_SECONDS
    assert records.find(ALICE, "a")
    now[0] += 1
    assert records.find(ALICE, "a") is None
    records.put(ALICE, "b", PARTS, 0)
    now[0] -= 1
    assert records.find(ALICE, "a") is None, "its memory is free, too"
