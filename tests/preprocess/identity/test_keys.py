"""Keys and cut points against their definition, written out naively."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from vlm_serve.preprocess.identity.keys import (
    Owners,
    PromptKeys,
    RootFields,
    Roots,
    WeightsIdentity,
    embedding_key,
)

END_OF_TURN = 7
ROOT = b"r" * 32


@dataclass(frozen=True)
class Span:
    start: int
    end: int
    modality: str = "image"
    content_hash: bytes = b"a" * 32
    patch: int = 0


def naive_key(parent: bytes, ids: list[int], at: int, end: int, spans: list[Span]) -> bytes:
    data = (
        parent + struct.pack("<I", end - at) + b"".join(struct.pack("<I", i) for i in ids[at:end])
    )
    for span in spans:
        if span.start < end and span.end > at:
            tag = {"image": 1, "video": 2}[span.modality]
            data += struct.pack("<BqI", tag, at - span.start, span.end - span.start)
            data += span.content_hash
    return blake3(data).digest()


def naive(
    ids: list[int], size: int, spans: list[Span]
) -> tuple[list[bytes], dict[int, bytes], set[int]]:
    cuts = {i for i in range(1, len(ids) + 1) if i % size == 0 or ids[i - 1] == END_OF_TURN}
    cuts |= {span.end for span in spans}
    keys: list[bytes] = []
    for at in range(0, len(ids) - size + 1, size):
        keys.append(naive_key(keys[-1] if keys else ROOT, ids, at, at + size, spans))
    tails = {}
    for cut in cuts:
        if cut % size:
            at = cut // size * size
            tails[cut] = naive_key(keys[at // size - 1] if at else ROOT, ids, at, cut, spans)
    return keys, tails, cuts


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], int, list[Span]]:
    size = draw(st.sampled_from([1, 4, 5, 16]))
    ids: list[int] = []
    spans = []
    for _ in range(draw(st.integers(0, 4))):
        ids += draw(st.lists(st.integers(0, 9), max_size=12))
        length = draw(st.integers(1, 20))
        modality = draw(st.sampled_from(["image", "video"]))
        content = bytes([draw(st.integers(0, 2))]) * 32
        spans.append(Span(len(ids), len(ids) + length, modality, content))
        ids += [11] * length
    ids += draw(st.lists(st.integers(0, 9), max_size=40))
    return ids, size, spans


def build(ids: list[int], size: int, spans: list[Span]) -> PromptKeys:
    return PromptKeys(ROOT, ids, block_size=size, spans=spans, end_of_turn_ids=[END_OF_TURN])


@given(prompts())
def test_keys_follow_the_definition(prompt: tuple[list[int], int, list[Span]]) -> None:
    ids, size, spans = prompt
    keys = build(ids, size, spans)
    expected, tails, cuts = naive(ids, size, spans)
    assert keys.block_keys == expected
    assert keys.tails == tails
    assert keys.cuts == sorted(cuts)
    assert len(keys) == len(ids)
    for position in range(len(ids) + 1):
        inside = any(span.start < position < span.end for span in spans)
        assert keys.inside_span(position) is inside
        allowed = [
            cut
            for cut in cuts
            if cut <= position and not any(span.start < cut < span.end for span in spans)
        ]
        assert keys.last_cut(position) == max(allowed, default=0)


@given(prompts(), st.lists(st.integers(0, 9), max_size=40), st.integers(0, 40))
def test_growing_equals_building_whole(
    prompt: tuple[list[int], int, list[Span]], more: list[int], split: int
) -> None:
    ids, size, spans = prompt
    grown = build(ids, size, spans)
    before = grown.fork()
    grown.extend(more[:split])
    grown.extend(more[split:])
    for keys, whole in (
        (grown, build(ids + more, size, spans)),
        (before, build(ids, size, spans)),
    ):
        assert keys.block_keys == whole.block_keys
        assert keys.tails == whole.tails
        assert keys.cuts == whole.cuts
        assert len(keys) == len(whole)


@given(prompts(), st.integers(0, 100))
def test_keys_are_a_function_of_the_prefix(
    prompt: tuple[list[int], int, list[Span]], end: int
) -> None:
    """What follows a cut point never changes its key, unless it ends inside a span."""
    ids, size, spans = prompt
    end = min(end, len(ids))
    if any(span.start < end < span.end for span in spans):
        return
    whole = build(ids, size, spans)
    part = build(ids[:end], size, [span for span in spans if span.end <= end])
    assert part.block_keys == whole.block_keys[: end // size]
    assert part.cuts == [cut for cut in whole.cuts if cut <= end]
    assert part.tails == {cut: key for cut, key in whole.tails.items() if cut <= end}


@pytest.mark.parametrize(
    "other",
    [
        Span(3, 9, content_hash=b"b" * 32),
        Span(3, 9, modality="video"),
        Span(3, 10),
        Span(2, 9),
        None,
    ],
)
def test_placeholders_of_other_media_have_other_keys(other: Span | None) -> None:
    ids = [11] * 16
    mine = build(ids, 4, [Span(3, 9)])
    theirs = build(ids, 4, [other] if other else [])
    assert mine.block_keys[0] != theirs.block_keys[0]
    assert mine.block_keys[3] != theirs.block_keys[3]  # chained: everything after differs too


def test_block_that_only_follows_a_medium_still_differs_through_its_parent() -> None:
    ids = [11] * 4 + [1] * 4
    mine, theirs = (build(ids, 4, [Span(0, 4, content_hash=c * 32)]) for c in (b"a", b"b"))
    assert mine.block_keys[1] != theirs.block_keys[1]


FIELDS = RootFields(
    weight_dtype="float32",
    compute_dtype="float32",
    memory="conv float32, kv float32",
    vision_dtype="float32",
    block_size=16,
    chunk_size=16,
    processor_fingerprint=b"p" * 32,
)


def test_every_root_field_counts() -> None:
    seen = {FIELDS.key()}
    for field in fields(FIELDS):
        value = getattr(FIELDS, field.name)
        other: dict[type, Any] = {bytes: b"x", str: "bfloat16", int: 64}
        seen.add(replace(FIELDS, **{field.name: other[type(value)]}).key())
    assert len(seen) == len(fields(FIELDS)) + 1


def test_root_fields_cannot_run_into_each_other() -> None:
    moved = replace(FIELDS, adapter="ab", cache_salt="c")
    assert moved.key() != replace(FIELDS, adapter="a", cache_salt="bc").key()


def test_keys_are_the_same_in_every_process() -> None:
    """Golden values: a change here makes every stored cache unreadable."""
    assert FIELDS.key().hex()[:16] == "2b603fe9ee3dd3d3"
    roots = Roots.of(Owners(FIELDS.key(), FIELDS.key()), WeightsIdentity(b"w" * 32, b"v" * 32))
    assert (roots.prompt.hex()[:16], roots.vision.hex()[:16]) == (
        "711215397a57860f",
        "e908b30fdcb6cc65",
    )
    keys = build([1, 2, 3, 11, 11, 7, 5], 4, [Span(3, 5)])
    assert keys.block_keys[0].hex()[:16] == "381611efd47c488f"
    assert {cut: key.hex()[:8] for cut, key in keys.tails.items()} == {5: "49c155f0", 6: "513e2459"}


def test_embedding_key_depends_on_root_content_and_how_many_rows_it_becomes() -> None:
    keys = {embedding_key(*key) for key in product((b"r", b"s"), (b"a", b"b"), (2, 4))}
    assert len(keys) == 8


@given(prompts(), st.lists(st.sampled_from([1, 2, END_OF_TURN]), max_size=20))
def test_keys_under_other_weights_are_those_of_a_prompt_made_for_them(
    prompt: tuple[list[int], int, list[Span]], answer: list[int]
) -> None:
    ids, size, spans = prompt
    owners = Owners(b"o" * 32, b"p" * 32)
    made = []
    for digest in (b"a" * 32, b"b" * 32):
        weights = WeightsIdentity(digest, b"v" + digest[1:])
        roots = Roots.of(owners, weights)
        keys = PromptKeys(
            roots.prompt, ids, block_size=size, spans=spans, end_of_turn_ids={END_OF_TURN},
            vision_root=roots.vision, owners=owners,
        )  # fmt: skip
        keys.extend(answer)
        made.append(keys)
    old, new = made
    moved = old.under(weights)
    assert moved.root != old.root and moved.vision_root != old.vision_root
    for keys in (new, moved):
        keys.extend([1, END_OF_TURN, 3])
    for name in PromptKeys.__slots__:
        assert getattr(moved, name) == getattr(new, name), name


@given(prompts(), st.data())
def test_known_keys_are_continued(prompt: tuple[list[int], int, list[Span]], data: Any) -> None:
    ids, size, spans = prompt
    whole = PromptKeys(ROOT, ids, block_size=size, spans=spans, end_of_turn_ids={END_OF_TURN})
    shared = data.draw(st.integers(0, len(ids)))
    if any(span.start < shared < span.end for span in spans):
        return
    before = [span for span in spans if span.end <= shared]
    other = [*ids[:shared], *data.draw(st.lists(st.integers(0, 9), max_size=40))]
    known = PromptKeys(ROOT, other, block_size=size, spans=before, end_of_turn_ids={END_OF_TURN})
    keys = PromptKeys(
        ROOT, ids, block_size=size, spans=spans, end_of_turn_ids={END_OF_TURN},
        known=known, shared=shared,
    )  # fmt: skip
    for name in PromptKeys.__slots__:
        assert getattr(keys, name) == getattr(whole, name), name
    keys.extend([1, END_OF_TURN, 3])
    whole.extend([1, END_OF_TURN, 3])
    assert (keys.block_keys, keys.tails, keys.cuts) == (whole.block_keys, whole.tails, whole.cuts)
