"""Probing, listing and pinning: nothing runs, and what is said is what then happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import CONVERSATIONS, photograph, random_ids, user
from serving import wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.errors import InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("inspection"), CheckpointSpec(image_max_pixels=128 * 128)
    )


def config(**options: Any) -> EngineConfig:
    return EngineConfig(dtype="float32", block_size=16, max_model_len=8192, **options)


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[Pipeline]:
    with Pipeline(checkpoint, config(cache_memory="96MiB")) as pipeline:
        yield pipeline


@pytest.fixture
def pipe(shared: Pipeline) -> Iterator[Pipeline]:
    shared.engine.flush()
    yield shared
    shared.engine.check()


def prompt_of(engine: Engine, length: int, seed: int) -> Any:
    return engine.preprocessor.prepare_tokens(random_ids(length, seed))


@pytest.mark.parametrize("name", ["text", "one image", "several turns", "everything"])
def test_a_probe_foretells_the_report(pipe: Pipeline, name: str) -> None:
    conversation = CONVERSATIONS[name]
    probe = pipe.probe(conversation)
    cold = pipe.chat(conversation, greedy(4))
    assert (probe.boundary, probe.reason) == (0, "cold")
    assert probe.media_encoded == cold.cache_report.media_encoded
    probe = pipe.probe(conversation)
    hit = pipe.chat(conversation, greedy(4))
    assert hit.usage.cached_tokens > 0
    assert probe == hit.cache_report


def test_a_probe_tells_what_a_new_picture_costs(pipe: Pipeline) -> None:
    known, new = photograph("coffee.png"), photograph("cell.png")
    pipe.chat([user(known, "What is this?")], greedy(1))
    probe = pipe.probe([user(known, new, known, "And these?")])
    # The last one is the first one again: its embedding is there although its KV is not.
    assert (probe.media_encoded, probe.media_skipped) == (1, 2)
    report = pipe.chat([user(known, new, known, "And these?")], greedy(1)).cache_report
    assert set(probe.snapshots) < set(report.snapshots), "the request has stored some"
    told = replace(probe, media_decoded=report.media_decoded, snapshots=report.snapshots)
    assert told == report


def test_a_probe_sees_lower_tiers(checkpoint: Path) -> None:
    options = config(cache_memory="2MiB", prefix_cache_state_budget=3, host_cache_memory="64MiB")
    with Pipeline(checkpoint, options) as pipe:
        ids = random_ids(210, seed=6)
        cold = pipe.generate(ids, greedy(4))
        pipe.engine.call(pipe.engine._cache.flush)
        probe = pipe.engine.probe(pipe.engine.preprocessor.prepare_tokens(ids))
        assert probe.tiers == {"host": 208}
        hit = pipe.generate(ids, greedy(4))
        assert hit.token_ids == cold.token_ids
        assert hit.cache_report.snapshots == (208,), "it came up with the KV"
        assert replace(hit.cache_report, snapshots=probe.snapshots) == probe


def test_a_probe_changes_nothing(pipe: Pipeline) -> None:
    prompt = prompt_of(pipe.engine, 100, 1)
    pipe.generate(random_ids(100, 1), greedy(1))
    before = pipe.engine.stats(), pipe.engine.tree()
    assert pipe.engine.probe(prompt).boundary == 96
    assert (pipe.engine.stats(), pipe.engine.tree()) == before


def test_the_tree_comes_in_pages(pipe: Pipeline) -> None:
    pipe.generate(random_ids(100, 2), greedy(1))
    whole = pipe.engine.tree()
    assert whole.total == len(whole.nodes) == 6
    assert [node.end for node in whole.nodes] == [16, 32, 48, 64, 80, 96]
    parts = [pipe.engine.tree(offset, 2) for offset in (0, 2, 4, 6)]
    assert [node for part in parts for node in part.nodes] == list(whole.nodes)
    assert parts[3].nodes == ()
    for offset, limit in ((-1, 1), (0, 0), (0, 1001)):
        with pytest.raises(InvalidRequestError, match="at least"):
            pipe.engine.tree(offset, limit)


def test_a_pinned_prefix_stays_until_its_time_has_come(shared: Pipeline, checkpoint: Path) -> None:
    memory = shared.engine.memory
    size = 40 * memory.block_bytes + 4 * memory.snapshot_bytes
    options = config(cache_memory=size, prefix_cache_state_budget=4)
    with Pipeline(checkpoint, options) as pipe:
        engine = pipe.engine
        now = [100.0]
        engine._inspector.clock = lambda: now[0]
        prompt = prompt_of(engine, 100, 3)
        assert engine.pins.add(prompt, 60.0) == 0, "nothing is there"
        pipe.generate(random_ids(100, 3), greedy(1))
        assert engine.pins.add(prompt, 60.0) == 96
        others = [random_ids(400, seed=10 + index) for index in range(4)]
        pipe.generate_many(others, greedy(1))
        assert engine.probe(prompt).boundary == 96
        engine.check()
        now[0] = 161.0
        pipe.generate_many(others[::-1], greedy(1))
        assert engine.probe(prompt).boundary < 96
        engine.check()


def test_pins_end_without_traffic(pipe: Pipeline) -> None:
    engine = pipe.engine
    pipe.generate(random_ids(40, 4), greedy(1))
    now = [0.0]
    clock, engine._inspector.clock = engine._inspector.clock, lambda: now[0]
    try:
        assert engine.pins.add(prompt_of(engine, 40, 4), 5.0) == 32
        assert [node.pins for node in engine.tree().nodes] == [1, 1]
        now[0] = 5.0
        engine.check()
        assert [node.pins for node in engine.tree().nodes] == [0, 0]
    finally:
        engine._inspector.clock = clock
    assert engine.pins.add(prompt_of(engine, 40, 4), 0.05) == 32
    wait_for(lambda: not any(node.pins for node in engine.tree().nodes))


def test_a_node_is_pinned_by_its_key(pipe: Pipeline) -> None:
    engine = pipe.engine
    pipe.generate(random_ids(100, 5), greedy(1))
    nodes = engine.tree().nodes
    assert engine.pins.add_node(bytes.fromhex(nodes[2].key), 60.0) == 48
    assert [node.pins for node in engine.tree().nodes] == [1, 1, 1, 0, 0, 0]
    assert engine.pins.add_node(b"x" * 32, 60.0) == 0
    entry = engine.mirror.find(bytes.fromhex(nodes[5].key))
    assert entry is not None
    engine.flush()
    assert engine.call(lambda: engine._inspector.pin_node(entry.node, 60.0, None)) == 0, (
        "it has left"
    )
    with pytest.raises(InvalidRequestError, match="ttl_seconds"):
        engine.pins.add_node(bytes.fromhex(nodes[2].key), 0.0)


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_time_to_live_that_cannot_be(pipe: Pipeline, ttl: float) -> None:
    with pytest.raises(InvalidRequestError, match="ttl_seconds"):
        pipe.engine.pins.add(prompt_of(pipe.engine, 20, 5), ttl)
