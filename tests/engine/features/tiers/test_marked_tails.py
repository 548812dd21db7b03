"""Marked prompts on one server, and prompts on others that share its store or its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from engines_on_a_store import opened, settle
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import photograph, user
from redis_server import StoreServer, running

from vlm_serve.pipeline.pipeline import Output, Pipeline

KNOWN = " ".join(f"word{index}" for index in range(60))
MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
SPECS = {"dense": CheckpointSpec(), "no state": CheckpointSpec(full_attention_interval=1)}


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("marks"), SPECS[request.param])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("dense"), SPECS["dense"])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    with running(tmp_path) as server:
        yield server


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
