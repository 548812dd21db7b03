"""Two engines on one real store: what one has computed the other reads, and no answer changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import random_ids
from redis_server import StoreServer, running

from vlm_serve.config import EngineConfig
from vlm_serve.engine.build import build
from vlm_serve.engine.engine import Engine
from vlm_serve.pipeline import Output, Pipeline

LENGTH = 210
CACHED = 208
"""The deepest block boundary before the last token."""
SPECS = {
    "dense": CheckpointSpec(),
    "moe": CheckpointSpec(num_experts=8),
    "no state": CheckpointSpec(full_attention_interval=1),
}


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("shared"), SPECS[request.param])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("dense"), SPECS["dense"])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    with running(tmp_path) as server:
        yield server


def open_pipeline(checkpoint: Path, store: StoreServer | None, **options: object) -> Pipeline:
    settings: dict[str, object] = {
        "dtype": "float32",
        "block_size": 16,
        "cache_memory": "8MiB",
        "max_num_seqs": 3,
        "max_model_len": 4096,
        "shared_store": None if store is None else store.url,
        "shared_store_timeout": 30.0,  # a machine that runs all tests at once is slow
    }
    config = EngineConfig(**(settings | options))  # type: ignore[arg-type]
    return Pipeline.from_engine(Engine(build(str(checkpoint), config, poison=True)))


def ask(pipe: Pipeline, seed: int = 1) -> Output:
    output = pipe.generate(random_ids(LENGTH, seed=seed), greedy(12))
    pipe.engine.check()
    return output


def settle(pipe: Pipeline) -> None:
    """Waits until what is wanted elsewhere is written."""
    tiers = pipe.engine._loop.tiers._tiers
    assert tiers is not None and tiers.sharer is not None
    deadline = time.monotonic() + 60
    while not tiers.sharer.idle:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def counts(pipe: Pipeline) -> dict[str, int]:
    """The tiers' counters, those of the store among them."""
    stats = pipe.engine.stats()["tiers"]
    return {**stats["counts"], **{name: n for name, n in stats.items() if name != "counts"}}


def test_what_one_has_computed_the_other_reads(checkpoint: Path, store: StoreServer) -> None:
    with open_pipeline(checkpoint, store) as first, open_pipeline(checkpoint, store) as second:
        cold = ask(first)
        assert cold.usage.cached_tokens == 0 and cold.cache_report.reason == "cold"
        settle(first)
        hit = ask(second)
        assert hit.token_ids == cold.token_ids
        assert hit.cache_report.tiers == {"shared": CACHED}
        assert hit.cache_report.reason == "full"
        assert counts(second)["shared_read_bytes"] > 0
        assert ask(second).cache_report.tiers == {"device": CACHED}
        settle(second)
        assert counts(second)["shared_written"] == 0, "it is there already"
