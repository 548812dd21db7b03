"""Marked prompts on one server, and prompts on others that share its store or its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from engines_on_a_store import opened, settle
from make_checkpoint import make_checkpoint
from parity import greedy, tapped
from parity_cases import photograph, user
from redis_server import StoreServer

from vlm_serve.cache.tiers.entry import Kind
from vlm_serve.cache.tiers.shared import SharedStore
from vlm_serve.pipeline.pipeline import Output, Pipeline

KNOWN = " ".join(f"word{index}" for index in range(60))
OTHER = f"{KNOWN}, or not"
MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
SPECS = {"dense": CheckpointSpec(), "no state": CheckpointSpec(full_attention_interval=1)}


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("marks"), SPECS[request.param])


def ask(pipe: Pipeline, question: str, *, known: str = KNOWN, marked: bool = False) -> Output:
    """Asks about a picture and a text, which ends at a mark if told to."""
    text: dict[str, Any] = {"type": "text", "text": known} | (MARK if marked else {})
    chat = user(photograph("coffee.png"), question)
    chat["content"].insert(1, text)
    output = pipe.chat([chat], greedy(6))
    pipe.engine.check()
    if pipe.engine.config.shared_store is not None:
        settle(pipe)
    return output


def mark_of(output: Output) -> int:
    (kept,) = output.cache_report.marks
    assert kept.position % 16, "no cut point without the mark"
    return kept.position


def forget(pipe: Pipeline) -> None:
    """Empties the device and the memory of marks, as a restart does."""
    pipe.engine.call(pipe.engine._cache.flush)


@pytest.mark.parametrize("policy", ["stable", "media"])
def test_what_is_marked_is_written_under_every_policy(
    dense: Path, store: StoreServer, policy: str
) -> None:
    with (
        opened(dense, store, shared_store_write=policy) as first,
        opened(dense, store) as second,
    ):
        mark = mark_of(ask(first, "How many cups are there?", marked=True))
        hit = ask(second, "What is in it?", marked=True)
        assert hit.cache_report.tiers == {"shared": mark}


def test_a_mark_is_found_at_another_server_by_prompts_without_it(
    checkpoint: Path, store: StoreServer
) -> None:
    """Find it with a picture before the mark, and with the bits of a cold run."""
    with (
        opened(checkpoint, store) as first,
        opened(checkpoint, store) as second,
        opened(checkpoint, None, enable_prefix_caching=False) as cold,
    ):
        mark = mark_of(ask(first, "How many cups are there?", marked=True))
        with tapped(second.engine) as ours, tapped(cold.engine) as theirs:
            hit, expected = ask(second, "What is in it?"), ask(cold, "What is in it?")
            assert torch.equal(ours.take()[0], theirs.take()[0])
        assert hit.cache_report.tiers == {"shared": mark}
        assert hit.token_ids == expected.token_ids
        again = ask(second, "Is it hot?")
        assert again.cache_report.tiers == {"device": mark}, "it knows the mark now"


def test_marks_of_two_servers_inside_one_block_are_both_found(
    dense: Path, store: StoreServer
) -> None:
    with (
        opened(dense, store) as first,
        opened(dense, store) as second,
        opened(dense, store) as third,
    ):
        texts, marks = (KNOWN, OTHER), list[int]()
        for pipe, known in zip((first, second), texts, strict=True):
            marks.append(mark_of(ask(pipe, "How many?", known=known, marked=True)))
        assert marks[0] // 16 == marks[1] // 16 and marks[0] < marks[1]
        for known, mark in zip(texts, marks, strict=True):
            hit = ask(third, "What is in it?", known=known)
            assert hit.cache_report.tiers == {"shared": mark}
            forget(third)


def record_name(pipe: Pipeline) -> bytes:
    """The name in the store of the record of the only mark of an engine."""
    tiers = pipe.engine._tiers._tiers
    assert tiers is not None and isinstance(tiers.stack.shared, SharedStore)
    shared, (place,) = tiers.stack.shared, pipe.engine._cache.ledger.marks._tails.values()
    assert shared._epoch is not None
    entry_id = tiers.stack.origin.id(Kind.MARKS, place.branch)
    return shared._keys.name(shared._epoch, entry_id)


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value[:-1] + bytes([value[-1] ^ 1]),
        lambda value: value[:-1],
        lambda value: value + bytes(1 << 20),
        lambda value: b"",
    ],
)
def test_a_damaged_record_costs_a_hit_and_is_replaced(
    dense: Path, store: StoreServer, damage: Callable[[bytes], bytes]
) -> None:
    with (
        opened(dense, store) as first,
        opened(dense, store) as second,
        opened(dense, store) as third,
    ):
        cold = ask(second, "What is in it?")
        forget(second)
        store.client.flushall()
        mark = mark_of(ask(first, "How many cups are there?", marked=True))
        name = record_name(first)
        value = store.client.get(name)
        assert isinstance(value, bytes)
        store.client.set(name, damage(value))
        miss = ask(second, "What is in it?")
        assert 0 < miss.usage.cached_tokens < mark and miss.token_ids == cold.token_ids
        ask(first, "How many are there?", known=OTHER, marked=True)
        assert ask(third, "Is it hot?").cache_report.tiers == {"shared": mark}


def test_a_flush_forgets_the_marks_of_all_servers(dense: Path, store: StoreServer) -> None:
    with opened(dense, store) as first, opened(dense, store) as second:
        ask(first, "How many cups are there?", marked=True)
        first.engine.flush()
        assert ask(second, "What is in it?").usage.cached_tokens == 0


@pytest.mark.parametrize("host", [0, "64MiB"])
def test_a_mark_is_found_on_disk_after_a_restart(
    checkpoint: Path, tmp_path: Path, host: int | str
) -> None:
    options = {"disk_cache_path": str(tmp_path / "cache"), "host_cache_memory": host}
    with opened(checkpoint, None, **options) as pipe:
        mark = mark_of(ask(pipe, "How many cups are there?", marked=True))
        there = ask(pipe, "What is in it?")
    with opened(checkpoint, None, **options) as pipe:
        hit = ask(pipe, "What is there?")
        assert hit.cache_report.tiers == {"disk": mark}
        forget(pipe)
        assert ask(pipe, "What is in it?").token_ids == there.token_ids
        mark = mark_of(ask(pipe, "How many?", known=OTHER, marked=True))
    with opened(checkpoint, None, **options) as pipe:
        hit = ask(pipe, "What is there?", known=OTHER)
        assert hit.cache_report.tiers == {"disk": mark}, "the record has been rewritten"
