"""An answer of a checkpoint without generation_config.json ends where its tokenizer says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from serving import ok, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.config import ServerConfig

MESSAGES = [{"role": "user", "content": "Where is the red circle? Where is the red circle?"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = CheckpointSpec(vision_depth=0, mtp=True)
    made = make_checkpoint(tmp_path_factory.mktemp("ends"), spec)
    (made / "generation_config.json").unlink()
    text_end = json.loads((made / "config.json").read_text())["eos_token_id"]
    assert isinstance(text_end, int)
    return made


@pytest.fixture(scope="module", params=["off", "suffix", "mtp"])
def pipe(path: Path, request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    config = EngineConfig(
        dtype="float32", cache_memory="16MiB", max_model_len=512, speculative=request.param
    )
    with Pipeline(str(path), config, reasoning_parser="none") as made:
        yield made


def ask(pipe: Pipeline, token: str, **fields: Any) -> Output:
    """Asks for an answer in which that token is likelier than all others."""
    token_id = pipe.engine.preprocessor.tokenizer.special_tokens[token]
    params = SamplingParams(max_tokens=12, temperature=0.0, logit_bias={token_id: 100.0}, **fields)
    return pipe.chat(MESSAGES, params)


@pytest.mark.parametrize("token", ["<|im_end|>", "<|endoftext|>"])
def test_both_ends_end_an_answer(pipe: Pipeline, token: str) -> None:
    output = ask(pipe, token)
    assert (output.finish_reason, len(output.token_ids)) == ("stop", 1)
    assert output.text == ""


def test_options_about_ends_know_all_of_them(pipe: Pipeline) -> None:
    ignored = ask(pipe, "<|im_end|>", ignore_eos=True)
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", 12)
    assert len(set(ignored.token_ids)) == 1
    later = ask(pipe, "<|im_end|>", min_tokens=7)
    assert (later.finish_reason, len(later.token_ids)) == ("stop", 8)
    end = later.token_ids[-1]
    assert end not in later.token_ids[:-1]


def test_a_server_ends_them_too(path: Path) -> None:
    config = EngineConfig(dtype="float32", cache_memory="16MiB", max_model_len=512)
    engine = Engine.from_checkpoint(str(path), config)
    end = engine.preprocessor.tokenizer.special_tokens["<|im_end|>"]
    with running(engine, ServerConfig(port=0, idle_check=False)) as server:
        fields = {"temperature": 0, "max_tokens": 9, "logit_bias": {str(end): 100}}
        choice = ok(server.post("/v1/chat/completions", {"messages": MESSAGES, **fields}))
        plain = ok(server.post("/v1/completions", {"prompt": "Where", **fields}))
        for body in (choice, plain):
            assert body["choices"][0]["finish_reason"] == "stop"
            assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("token", ["<|im_end|>", "<|endoftext|>"])
def test_the_token_that_ends_an_answer_may_be_part_of_it(pipe: Pipeline, token: str) -> None:
    assert ask(pipe, token, include_stop_str_in_output=True).text == ""
    assert ask(pipe, token, skip_special_tokens=False).text == ""
    both = ask(pipe, token, include_stop_str_in_output=True, skip_special_tokens=False)
    assert (both.text, both.finish_reason, both.stop_reason) == (token, "stop", None)


def test_special_tokens_inside_an_answer_may_be_text(pipe: Pipeline) -> None:
    assert ask(pipe, "<|im_end|>", ignore_eos=True).text == ""
    kept = ask(pipe, "<|im_end|>", ignore_eos=True, skip_special_tokens=False)
    assert kept.text == "<|im_end|>" * 12
    stop = "end|><|"
    cut = ask(pipe, "<|im_end|>", ignore_eos=True, skip_special_tokens=False, stop=stop)
    assert (cut.text, cut.stop_reason) == ("<|im_", stop)


def test_a_stop_token_or_text_may_be_part_of_the_answer(pipe: Pipeline) -> None:
    free = pipe.chat(MESSAGES, SamplingParams(max_tokens=12, temperature=0.0))
    tokenizer = pipe.engine.preprocessor.tokenizer
    at = next(i for i, token in enumerate(free.token_ids) if token not in free.token_ids[:i] and i)
    word = tokenizer.decode(free.token_ids[:at])
    params = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(free.token_ids[at],))
    assert pipe.chat(MESSAGES, params).text == word
    ended = pipe.chat(MESSAGES, dataclasses.replace(params, include_stop_str_in_output=True))
    assert ended.text == tokenizer.decode(free.token_ids[: at + 1])
    assert ended.stop_reason == free.token_ids[at]
