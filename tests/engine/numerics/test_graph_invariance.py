"""A prompt's row has the same bits alone, in company, in any split, with graphs and without.

Whole engines on Triton's interpreter: by ops, and with captured steps on the fake device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_spec import CheckpointSpec
from invariance import Answer, answer_of
from make_checkpoint import make_checkpoint
from queued_device import QueuedDevice, with_queue
from sweeps import quick
from triton_case import engines_on_triton

from vlm_serve.engine.steps import sampler
from vlm_serve.kernels.paged_attention import triton as attention_triton
from vlm_serve.kernels.triton_support import interpreted
from vlm_serve.models import model as modelling
from vlm_serve.models.parts import feed_forward
from vlm_serve.models.parts.base import Step
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

TINY = CheckpointSpec(
    num_layers=2,
    full_attention_interval=2,
    gdn_key_heads=1,
    gdn_value_heads=1,
    attention_heads=2,
    kv_heads=1,
    vision_depth=0,
)
SPECS = {
    "tiny": TINY,
    "attention alone": replace(TINY, full_attention_interval=1),
    "experts": replace(TINY, num_experts=4),
    "codes": TINY,
}
CONFIG = EngineConfig(
    dtype="float32",
    block_size=16,
    cache_memory="16MiB",
    max_num_seqs=2,
    max_num_batched_tokens=32,
    max_model_len=64,
    threads=1,
    compiled_kernels=False,
    deterministic=True,
)
PART = 32
"""Keys of a part: prompts have several."""
PROMPTS = [[(13 * place + 5) % 400 for place in range(length)] for length in (5, 41)]


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention_triton, "FIXED_PART", PART)
    # The Triton kernels do not read the experts' packed weights of the CPU path.
    monkeypatch.setattr(feed_forward, "stacked_experts", lambda device: True)
    # On a CPU, torch sums log-probabilities, in an order that depends on the processor.
    monkeypatch.setattr(sampler, "at_once", lambda logits: True)
    with engines_on_triton(), np.errstate(all="ignore"):
        yield


def answers(checkpoint: Path, config: EngineConfig) -> list[list[Answer]]:
    """Answers to prompts alone, in company, and as hits in company."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=3)
    with Pipeline(checkpoint, config) as pipe:
        alone = []
        for prompt in PROMPTS:
            pipe.engine.flush()
            alone += [answer_of(each) for each in pipe.generate_many([prompt], params)]
        pipe.engine.flush()
        together = [
            [answer_of(each) for each in pipe.generate_many(PROMPTS, params)] for _ in range(2)
        ]
        pipe.engine.check()
    return [alone, *together]


@pytest.mark.interpreter
@pytest.mark.usefixtures("on_triton")
@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", quick(SPECS, 1))
def test_graphs_and_splits_change_no_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, SPECS[name])
    config = replace(CONFIG, quantization="int8" if name == "codes" else None)
    by_ops = answers(checkpoint, replace(config, max_num_batched_tokens=24))
    assert by_ops[1] == by_ops[2] == by_ops[0]
    device = QueuedDevice()
    with_queue(monkeypatch, device)
    assert answers(checkpoint, config) == by_ops
    assert device.calls > 6


def test_a_card_s_table_fixes_steps_with_prompts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All their rows, decoded tokens among them; other steps keep the faster products."""
    monkeypatch.setattr(modelling, "fixed_steps", lambda device: True)
    seen: set[tuple[bool, bool]] = set()

    def step(**parts: Any) -> Step:
        seen.add((parts["prefill"] is not None, parts["deterministic"]))
        return Step(**parts)

    monkeypatch.setattr(modelling, "Step", step)
    answers(make_checkpoint(tmp_path, TINY), replace(CONFIG, deterministic=False))
    assert seen == {(True, True), (False, False)}
