"""What an engine keeps has a name, and gives it up when it is flushed."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from families import SPECS
from make_checkpoint import make_checkpoint
from waiting import wait_for

from vlm_serve.cache.listing import NODE_BYTES
from vlm_serve.cache.tiers.store import ENTRY_BYTES
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.drafts.suffix import BYTES_PER_TOKEN
from vlm_serve.options.config import EngineConfig
from vlm_serve.sampling_params import SamplingParams

BLOCK, BLOCKS = 16, 24


def ask(engine: Engine, number: int) -> None:
    ended = threading.Event()
    prompt = engine.preprocessor.prepare_tokens([10 + (7 * number + at) % 90 for at in range(80)])
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    engine.submit(prompt, params, lambda delta: ended.set() if delta.finish_reason else None)
    assert ended.wait(60)


def test_everything_that_is_kept_has_a_name(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, SPECS["dense, equal heads, one kv head"])
    plain = EngineConfig(block_size=BLOCK, cache_memory=1 << 20, max_model_len=256)
    engine = Engine.from_checkpoint(str(path), plain)
    block = engine.memory.block_bytes
    engine.close()
    config = replace(
        plain,
        cache_memory=BLOCKS * block + (1 << 20),
        host_cache_memory=1 << 22,
        speculative="suffix",
        threads=1,
    )
    engine = Engine.from_checkpoint(str(path), config)
    try:
        first = engine.stats()["held_bytes"]
        assert not any(first.values())
        for number in range(30):
            ask(engine, number)
        wait_for(lambda: engine.stats()["held_bytes"]["host_tier"] > 0)
        stats = engine.stats()
        held, usage = stats["held_bytes"], stats["usage"]
        assert held["drafts"] >= 29 * 7 * BYTES_PER_TOKEN  # the last ones follow with a step
        assert held["tree"] == usage["nodes"] * (NODE_BYTES + 4 * BLOCK)
        assert held["tier_index"] % ENTRY_BYTES == 0 < held["tier_index"]
        used = held["kv"] + held["state"] + held["idle_pools"]
        engine.flush()
        flushed = engine.stats()["held_bytes"]
        assert flushed["kv"] == flushed["state"] == flushed["tree"] == flushed["host_tier"] == 0
        assert flushed["idle_pools"] == used, "pages that were written stay with the process"
    finally:
        engine.close()
