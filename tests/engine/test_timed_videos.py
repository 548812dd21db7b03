"""Hits of prompts with videos whose positions tell the time have the bits of cold runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import clip, frames, record, say
from families import SPECS
from make_checkpoint import make_checkpoint
from parity import reference, tapped

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.output import Output
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("timed"), SPECS["vl of qwen2.5"])


@pytest.fixture(scope="module")
def pipe(checkpoint: Path) -> Iterator[Pipeline]:
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="64MiB", speculative="off")
    with Pipeline(checkpoint, config) as made:
        yield made


def ask(rate: float) -> list[dict[str, Any]]:
    video = clip(frames(12, 64, 64), fps=rate, num_frames=-1)
    return [say("This is a recording: ", video, "What is the red circle?")]


def answer(pipe: Pipeline, messages: list[dict[str, Any]], **options: Any) -> tuple[Output, Any]:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, **options)
    with tapped(pipe.engine) as tap:
        continued = messages[-1]["role"] == "assistant"
        output = pipe.chat(messages, params, continue_final_message=continued)
        return output, tap.take()[0]


def cold(pipe: Pipeline, messages: list[dict[str, Any]]) -> tuple[Output, Any]:
    pipe.engine.flush()
    return answer(pipe, messages)


@pytest.mark.parametrize("rates", [(1.0, 2.0), (2.0, 1.0), (0.1, 4.0)])
def test_the_same_frames_at_another_rate(pipe: Pipeline, rates: tuple[float, float]) -> None:
    expected, logits = cold(pipe, ask(rates[1]))
    cold(pipe, ask(rates[0]))
    output, own = answer(pipe, ask(rates[1]))
    first = output.prompt_token_ids.index(max(output.prompt_token_ids))
    assert 0 < output.usage.cached_tokens < first + 80
    assert output.token_ids == expected.token_ids and own.equal(logits)
    again, own = answer(pipe, ask(rates[1]))
    assert again.usage.cached_tokens > output.usage.cached_tokens and own.equal(logits)


@pytest.mark.parametrize("rate", [0.1, 4.0])
def test_the_next_turn_reuses_an_answer_also_behind_a_late_patch(
    pipe: Pipeline, rate: float
) -> None:
    dot = pipe.tokenizer.encode_plain(".")

    def said(count: int) -> list[dict[str, Any]]:
        return [*ask(rate), {"role": "assistant", "content": count * "."}]

    pipe.engine.flush()
    told, _ = answer(pipe, said(1), logit_bias={dot[0]: 100.0})
    assert told.token_ids == 40 * dot
    output, logits = answer(pipe, said(38))
    assert output.usage.cached_tokens > len(told.prompt_token_ids) + 16
    expected, own = cold(pipe, said(38))
    assert output.token_ids == expected.token_ids and own.equal(logits)


def test_an_answer_behind_a_late_patch_equals_transformers(
    pipe: Pipeline, checkpoint: Path, tmp_path: Path
) -> None:
    record(tmp_path / "late.mp4", frames(90, 32, 32), 5)
    asked = [say("x", clip(str(tmp_path / "late.mp4")))]
    output, logits = cold(pipe, asked)
    expected = reference(checkpoint, asked, 8)
    assert output.token_ids[:8] == expected.token_ids[:8]
    assert (logits[:8] - expected.logits[:8]).abs().max() < 1e-4


def test_positions_with_fractions(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, SPECS["omni"])
    record(tmp_path / "late.mp4", frames(9, 40, 48), 1)
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="64MiB")

    def at_rate(rate: float) -> list[dict[str, Any]]:
        return [say("x", clip(frames(4, 64, 64), fps=rate, num_frames=-1), "What?")]

    with Pipeline(path, config) as pipe:
        asked = [say("x", clip(str(tmp_path / "late.mp4")))]
        output, logits = cold(pipe, asked)
        expected = reference(path, asked, 8)
        assert output.token_ids[:8] == expected.token_ids[:8]
        assert (logits[:8] - expected.logits[:8]).abs().max() < 1e-4
        later = [*asked, {"role": "assistant", "content": output.text}, say("And then?")]
        more, own = answer(pipe, later)
        assert more.usage.cached_tokens >= len(output.prompt_token_ids) - 16
        again, others = cold(pipe, later)
        assert more.token_ids == again.token_ids and own.equal(others)
        wanted, logits = cold(pipe, at_rate(7.0))
        cold(pipe, at_rate(3.0))
        output, own = answer(pipe, at_rate(7.0))
        assert 0 < output.usage.cached_tokens < len(output.prompt_token_ids) - 100
        assert output.token_ids == wanted.token_ids and own.equal(logits)
