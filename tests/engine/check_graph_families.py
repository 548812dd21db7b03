"""Checks that every family of models answers the same with captured steps. Too slow for each run,
since the Triton kernels run in their interpreter: `make test-graphs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import SPECS
from make_checkpoint import make_checkpoint
from parity_cases import user
from queued_device import QueuedDevice, with_queue

from vlm_serve.models.parts import feed_forward
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams


def picture() -> dict[str, Any]:
    noise = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return {"type": "image", "image": noise}


@pytest.mark.parametrize("name", SPECS)
def test_a_family_answers_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The Triton kernels do not read the experts' packed weights of the CPU path.
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)
    checkpoint = make_checkpoint(tmp_path, SPECS[name])
    config = EngineConfig(
        dtype="float32",
        block_size=16,
        cache_memory="16MiB",
        max_num_seqs=3,
        max_num_batched_tokens=32,
        max_model_len=256,
        compiled_kernels=False,
    )
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [[(13 * place + length) % 400 for place in range(length)] for length in (3, 90, 40)]

    def answers() -> list[list[int]]:
        with Pipeline(checkpoint, config) as pipe:
            outputs = pipe.generate_many(prompts, params)
            if pipe.engine.spec.vision is not None:
                outputs.append(pipe.chat([user(picture(), "Why?")], params))
            pipe.engine.check()
            return [list(one.token_ids) for one in outputs]

    expected = answers()
    device = QueuedDevice()
    with_queue(monkeypatch, device)
    assert answers() == expected
    assert device.calls > 6
