"""A request that has ended is gone at once: nothing of it waits for the garbage collector."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

from families import SPECS
from make_checkpoint import make_checkpoint
from waiting import wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.request import Request
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup
from vlm_serve.options.config import EngineConfig
from vlm_serve.sampling_params import SamplingParams


def left() -> int:
    kinds = {Request, Sequence, SequenceGroup}
    return sum(type(each) in kinds for each in gc.get_objects())


def test_ended_requests_are_no_circle(tmp_path: Path) -> None:
    """Else each keeps its prompt, its media's pixels and its client's queue until then."""
    path = make_checkpoint(tmp_path, SPECS["dense, equal heads, one kv head"])
    options = EngineConfig(cache_memory="16MiB", block_size=16, max_model_len=512, threads=1)
    engine = Engine.from_checkpoint(str(path), options)
    gc.collect()
    before = left()
    gc.disable()
    try:
        for number, choices in enumerate((1, 2) * 5):
            ended, open_choices = threading.Event(), [choices]

            def received(
                delta: Delta, ended: threading.Event = ended, left: list[int] = open_choices
            ) -> None:
                left[0] -= delta.finish_reason is not None
                if not left[0]:
                    ended.set()

            params = SamplingParams(max_tokens=400 if number % 4 == 2 else 4, n=choices)
            prompt = engine.preprocessor.prepare_tokens(list(range(10, 60)))
            request = engine.submit(prompt, params, received)
            if number % 4 == 2:
                engine.abort(request)
            assert ended.wait(60)
        latest = 1 + 1 + 2  # until the next step
        wait_for(lambda: bool(engine.stats()) and left() <= before + latest)
    finally:
        gc.enable()
        engine.close()
