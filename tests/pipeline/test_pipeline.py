"""The Python interface as somebody meets it who writes the wrong thing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlm_serve import EngineConfig, Pipeline, SamplingParams, StructuredOutputs
from vlm_serve.errors import (
    ConfigError,
    EngineClosedError,
    FieldError,
    InvalidRequestError,
    MediaFetchError,
    ModelNotFoundError,
)


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline("demo", EngineConfig(cache_memory="64MiB")) as made:
        yield made


def test_a_file_that_cannot_be_read_is_named(pipe: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(
        MediaFetchError, match=r"the file 'nosuch\.png' cannot be read: No such file"
    ):
        pipe(("Where?", "nosuch.png"))
    with pytest.raises(MediaFetchError, match=f"the file '{tmp_path.name}' cannot be read: "):
        pipe(("Where?", tmp_path))


def test_an_unknown_adapter_is_told_how_to_be_one(pipe: Pipeline) -> None:
    with pytest.raises(ModelNotFoundError, match="no adapter 'x' is loaded: lora_modules"):
        pipe.chat([{"role": "user", "content": "Hello"}], lora="x")


def test_what_is_no_option_is_explained(pipe: Pipeline) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    wrong: Any = {"max_tokens": 3}
    for ask in (pipe.chat, lambda *each: list(pipe.stream(*each))):
        with pytest.raises(InvalidRequestError, match="params must be a SamplingParams"):
            ask(hello, wrong)
    with pytest.raises(InvalidRequestError, match="1 adapters for 2 prompts"):
        pipe.chat_many([hello, hello], lora=[None])
    with pytest.raises(FieldError, match="structured_outputs must be a StructuredOutputs"):
        SamplingParams(structured_outputs=wrong)
    with pytest.raises(ConfigError, match="config must be an EngineConfig, not dict"):
        Pipeline("demo", wrong)


def test_an_answer_takes_the_form_asked_for(pipe: Pipeline) -> None:
    """The class is one of the package's own names."""
    form = StructuredOutputs(choice=("red", "blue"))
    params = SamplingParams(structured_outputs=form)
    picture = Path(__file__).parents[2] / "examples" / "media" / "star.png"
    assert pipe(("What color is the star?", picture), params).text == "red"


def test_a_closed_pipeline_says_so() -> None:
    made = Pipeline("demo", EngineConfig(cache_memory="64MiB"))
    made.close()
    hello = [{"role": "user", "content": "Hello"}]
    for ask in (made.chat, lambda each: list(made.stream(each)), made.probe):
        with pytest.raises(EngineClosedError, match="make another"):
            ask(hello)
    made.close()
