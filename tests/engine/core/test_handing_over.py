"""When a caller is told that all deltas of a step have come."""

from __future__ import annotations

import threading
from pathlib import Path

from make_checkpoint import make_checkpoint
from parity import greedy
from together import together

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.options.config import EngineConfig


def test_a_step_is_handed_over_once_behind_all_its_deltas(tmp_path: Path) -> None:
    """Also one in which answers end, and the abort of a request."""
    config = EngineConfig(
        dtype="float32", block_size=16, cache_memory="32MiB", threads=1, speculative="off"
    )
    engine = Engine.from_checkpoint(str(make_checkpoint(tmp_path)), config)
    told: list[str] = []
    ended = threading.Semaphore(0)

    def take(delta: Delta) -> None:
        told.append("delta")
        if delta.finish_reason is not None:
            ended.release()

    def hand_over() -> None:
        told.append("step")

    prompts = [engine.preprocessor.prepare_tokens([5, 6, 7, number]) for number in range(3)]
    with together(engine, len(prompts)):
        for prompt in prompts:
            engine.submit(prompt, greedy(4), take, on_step=hand_over)
    for _ in prompts:
        assert ended.acquire(timeout=60)
    engine.call(lambda: None)
    steps = "".join(told).split("step")
    assert steps.pop() == "" and 4 <= len(steps) <= 6
    assert all(steps) and "".join(steps) == "delta" * 12
    told.clear()
    name = engine.submit(prompts[0], greedy(1000), take, on_step=hand_over)
    engine.abort(name)
    assert ended.acquire(timeout=60)
    engine.call(lambda: None)
    assert told[-2:] == ["delta", "step"]
    engine.close()
