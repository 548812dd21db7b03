"""Engines that share a real store."""

from __future__ import annotations

import time
from pathlib import Path

from redis_server import StoreServer

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.start.build import build
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline


def settings(store: StoreServer | None, **options: object) -> EngineConfig:
    given: dict[str, object] = {
        "dtype": "float32",
        "block_size": 16,
        "cache_memory": "32MiB",
        "max_num_seqs": 3,
        "max_model_len": 4096,
        "shared_store": None if store is None else store.url,
        "shared_store_timeout": 30.0,  # a machine that runs all tests at once is slow
    }
    return EngineConfig(**(given | options))  # type: ignore[arg-type]


def opened(checkpoint: Path | str, store: StoreServer | None, **options: object) -> Pipeline:
    config = settings(store, **options)
    return Pipeline.from_engine(Engine(build(str(checkpoint), config, poison=True)))


def settle(pipe: Pipeline) -> None:
    """Waits until what is wanted elsewhere is written."""
    tiers = pipe.engine._tiers._tiers
    assert tiers is not None and tiers.sharer is not None
    deadline = time.monotonic() + 60
    while not tiers.sharer.idle:
        assert time.monotonic() < deadline
        time.sleep(0.01)
