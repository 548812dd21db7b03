"""What a caller may write in place of messages, and which keyword belongs where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vlm_serve
from vlm_serve import EngineConfig, Pipeline, SamplingParams, StructuredOutputs
from vlm_serve.errors import InvalidRequestError
from vlm_serve.pipeline.inputs import messages_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SHAPES = Path(__file__).parents[2] / "examples" / "media" / "shapes.png"
ANSWER = "Hello! Ask me about a picture or a video."


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline("demo", EngineConfig(cache_memory="64MiB", threads=1)) as made:
        yield made


@pytest.mark.parametrize("wrong", [("alone",), ("a", "b", "c"), 5, None, (b"a", "b"), {"a": 1}])
def test_the_short_form_is_explained(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="the short form is text, "):
        messages_of(wrong)


@pytest.mark.parametrize("name", ["a.mp4", "b.WMV", "c.flv", "d.mpeg", Path("e.mpg"), "f.m2ts?x=1"])
def test_names_of_videos_make_videos(name: str | Path) -> None:
    """Every container that docs/video.md names is a video by its usual suffix."""
    assert messages_of(("What happens?", name))[0]["content"][0] == {"type": "video", "video": name}


def test_the_short_form_stands_wherever_messages_do(pipe: Pipeline) -> None:
    hello = "Hello"
    assert pipe.chat(hello, GREEDY).text == ANSWER
    assert "".join(delta.text for delta in pipe.stream(hello, GREEDY)) == ANSWER
    assert pipe.chat_many([hello, hello], GREEDY)[1].text == ANSWER
    assert pipe.chat(("What color is the star?", SHAPES), GREEDY).text == "The star is red."
    assert pipe.probe(hello).prompt_tokens == pipe.chat(hello, GREEDY).usage.prompt_tokens


def test_counters_of_the_engine_know_what_was_reused(pipe: Pipeline) -> None:
    pipe.chat("Counted", GREEDY)
    before = pipe.stats()["cache"]
    usage = pipe.chat("Counted", GREEDY).usage
    after = pipe.stats()["cache"]
    assert after["hit_tokens"] - before["hit_tokens"] == usage.cached_tokens > 0
    assert after["query_tokens"] - before["query_tokens"] == usage.prompt_tokens


@pytest.mark.parametrize("wrong", [5, {"role": "user", "content": "x"}, b"text", 2.5])
def test_what_is_no_conversation_is_told_what_to_write(pipe: Pipeline, wrong: Any) -> None:
    for ask in (pipe.chat, pipe.probe, lambda given: list(pipe.stream(given))):
        with pytest.raises(InvalidRequestError, match=r'such as \[\{"role": "user", "content": '):
            ask(wrong)


def test_text_is_continued_as_its_tokens_are(pipe: Pipeline) -> None:
    text = "The star is"
    ids = pipe.tokenizer.encode(text)
    said, counted = pipe.generate(text, GREEDY), pipe.generate(ids, GREEDY)
    assert said.token_ids == counted.token_ids
    assert pipe.tokenizer.decode(ids) == text
    assert [each.text for each in pipe.generate_many([text, ids], GREEDY)] == [said.text] * 2


@pytest.mark.parametrize("number", [np.int64, np.int32, torch.tensor])
def test_numbers_of_other_libraries_are_numbers(number: Callable[[int], Any]) -> None:
    params = SamplingParams(max_tokens=number(3), stop_token_ids=[number(5)])  # type: ignore[arg-type]
    assert params == SamplingParams(max_tokens=3, stop_token_ids=(5,))
    assert type(params.max_tokens) is int
    assert EngineConfig(max_num_seqs=number(3)).max_num_seqs == 3
    assert SamplingParams(temperature=np.float32(0.5)).temperature == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "keyword", "said"),
    [
        (EngineConfig, "cach_memory", "did you mean cache_memory"),
        (EngineConfig, "max_tokens", r"it belongs to SamplingParams\(max_tokens=...\)"),
        (SamplingParams, "max_token", "did you mean max_tokens"),
        (SamplingParams, "regex", r"it belongs to StructuredOutputs\(regex=...\)"),
        (StructuredOutputs, "regexp", "did you mean regex"),
        (Pipeline, "cache_memory", r"it belongs to EngineConfig\("),
    ],
)
def test_a_wrong_keyword_names_the_right_place(made: type[Any], keyword: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        made(**{keyword: 3})


def test_the_package_offers_its_names() -> None:
    assert dir(vlm_serve) == sorted(vlm_serve.__all__)
