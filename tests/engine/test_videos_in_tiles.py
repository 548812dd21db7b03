"""Hits of prompts with videos whose frames are pictures have the bits of cold runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import clip, frames, say
from families import SPECS
from make_checkpoint import make_checkpoint
from parity import reference, tapped

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.output import Output
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

_GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("frames"), SPECS["internvl"])


@pytest.fixture(scope="module")
def pipe(checkpoint: Path) -> Iterator[Pipeline]:
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="64MiB", speculative="off")
    with Pipeline(checkpoint, config) as made:
        yield made


def answer(pipe: Pipeline, messages: list[dict[str, Any]]) -> tuple[Output, Any]:
    with tapped(pipe.engine) as tap:
        return pipe.chat(messages, _GREEDY), tap.take()[0]


def cold(pipe: Pipeline, messages: list[dict[str, Any]]) -> tuple[Output, Any]:
    pipe.engine.flush()
    return answer(pipe, messages)


def ask(video: Any, question: str) -> list[dict[str, Any]]:
    return [say("This is a recording: ", clip(video), question)]


def test_another_question(pipe: Pipeline, checkpoint: Path) -> None:
    video = frames(6, 50, 70)
    cold(pipe, ask(video, "What is the red circle?"))
    output, logits = answer(pipe, ask(video, "Who is this?"))
    assert output.usage.cached_tokens > 6 * 16
    expected, own = cold(pipe, ask(video, "Who is this?"))
    assert output.token_ids == expected.token_ids and logits.equal(own)
    told = reference(checkpoint, ask(video, "Who is this?"), 16)
    assert output.token_ids == told.token_ids
    assert (logits - told.logits).abs().max() < 1e-4


def test_frames_before_a_changed_one_are_reused(pipe: Pipeline) -> None:
    video = frames(6, 50, 70)
    changed = video.copy()
    changed[4, 0, 0] ^= 255
    first, _ = cold(pipe, ask(video, "What is this?"))
    output, logits = answer(pipe, ask(changed, "What is this?"))
    assert len(output.prompt_token_ids) == len(first.prompt_token_ids)
    pad = max(output.prompt_token_ids, key=output.prompt_token_ids.count)
    places = [i for i, token in enumerate(output.prompt_token_ids) if token == pad]
    per_frame = len(places) // 6
    assert places[4 * per_frame - 1] < output.usage.cached_tokens <= places[4 * per_frame]
    expected, own = cold(pipe, ask(changed, "What is this?"))
    assert output.token_ids == expected.token_ids and logits.equal(own)


def test_a_frame_is_no_picture_and_has_a_number(pipe: Pipeline) -> None:
    """The same pixels at another place are embedded once, but share no block."""
    video = frames(2, 64, 64)
    cold(pipe, ask(video, "What is this?"))
    output, logits = answer(pipe, ask(video[::-1].copy(), "What is this?"))
    pad = max(output.prompt_token_ids, key=output.prompt_token_ids.count)
    assert output.usage.cached_tokens <= output.prompt_token_ids.index(pad)
    expected, own = cold(pipe, ask(video[::-1].copy(), "What is this?"))
    assert output.token_ids == expected.token_ids and logits.equal(own)
