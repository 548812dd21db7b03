"""Thoughts in Python: apart from the answer, as over HTTP."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serving import ok, running

from vlm_serve import EngineConfig, Output, Pipeline, SamplingParams, StructuredOutputs
from vlm_serve.errors import ConfigError
from vlm_serve.server.config import ServerConfig

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
CONFIG = EngineConfig(cache_memory="64MiB", threads=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
THOUGHT, ANSWER = "They talk to me.", "Hello! Ask me about a picture or a video."


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline("demo", CONFIG) as made:
        yield made


def test_the_text_is_the_answer_and_the_thought_is_apart(pipe: Pipeline) -> None:
    output = pipe.chat(HELLO, GREEDY, **THINKING)
    assert (output.text, output.reasoning) == (ANSWER, THOUGHT)
    assert (output.choices[0].text, output.choices[0].reasoning) == (ANSWER, THOUGHT)
    tokenizer = pipe.engine.preprocessor.tokenizer
    whole = tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert whole == f"{THOUGHT}\n</think>\n\n{ANSWER}", "the tokens are those of both"
    plain = pipe.chat(HELLO, GREEDY)
    assert (plain.text, plain.reasoning) == (ANSWER, None)


def test_every_call_splits(pipe: Pipeline) -> None:
    many = pipe.chat_many([HELLO, HELLO], GREEDY, **THINKING)
    assert [(each.text, each.reasoning) for each in many] == [(ANSWER, THOUGHT)] * 2
    assert pipe("Hello", GREEDY).reasoning is None
    config = replace(CONFIG, chat_template_kwargs={"enable_thinking": True})
    with Pipeline("demo", config) as thinking:
        outputs = [thinking("Hello", GREEDY), *thinking(["Hello"], GREEDY)]
    assert [(each.text, each.reasoning) for each in outputs] == [(ANSWER, THOUGHT)] * 2


def test_a_stream_has_the_thought_in_an_attribute_of_its_own(pipe: Pipeline) -> None:
    deltas = list(pipe.stream(HELLO, replace(GREEDY, n=2), **THINKING))
    whole = pipe.chat(HELLO, replace(GREEDY, n=2), **THINKING)
    for index, choice in enumerate(whole.choices):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == choice.text == ANSWER
        assert "".join(delta.reasoning for delta in mine) == choice.reasoning == THOUGHT
        assert [token for delta in mine for token in delta.token_ids] == choice.token_ids
        first = next(i for i, delta in enumerate(mine) if delta.text)
        assert not any(delta.reasoning for delta in mine[first:])
        assert sum(bool(delta.reasoning) for delta in mine) > 1, "the thought comes piece by piece"


def test_a_thought_that_the_limit_cuts_leaves_no_text(pipe: Pipeline) -> None:
    short = replace(GREEDY, max_tokens=5, logprobs=1)
    output = pipe.chat(HELLO, short, **THINKING)
    assert output.text == "" and output.reasoning and THOUGHT.startswith(output.reasoning)
    assert output.finish_reason == "length"
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == 5
    deltas = list(pipe.stream(HELLO, short, **THINKING))
    assert "".join(delta.text for delta in deltas) == ""
    assert "".join(delta.reasoning for delta in deltas) == output.reasoning
    # The mark itself is cut: its beginning belongs to nothing.
    ids = pipe.chat(HELLO, GREEDY, **THINKING).token_ids
    tokenizer = pipe.engine.preprocessor.tokenizer
    for count in range(1, len(ids)):
        cut = pipe.chat(HELLO, replace(GREEDY, max_tokens=count), **THINKING)
        assert "<" not in (cut.reasoning or "") + cut.text, tokenizer.decode(ids[:count])


def test_stop_strings_and_forms_begin_behind_the_thought(pipe: Pipeline) -> None:
    output = pipe.chat(HELLO, replace(GREEDY, stop=("talk", "picture")), **THINKING)
    assert (output.text, output.reasoning) == ("Hello! Ask me about a ", THOUGHT)
    assert output.stop_reason == "picture"
    form = StructuredOutputs(json={"enum": ["red", "blue"]})
    output = pipe.chat(HELLO, replace(GREEDY, structured_outputs=form), **THINKING)
    assert json.loads(output.text) in ("red", "blue")
    assert output.reasoning == THOUGHT
    ended = pipe.chat(HELLO, replace(GREEDY, thinking_token_budget=2), **THINKING)
    assert ended.reasoning == "They" and ended.text


def test_a_continued_thought_goes_on(pipe: Pipeline) -> None:
    begun = [*HELLO, {"role": "assistant", "content": None, "reasoning": "They talk"}]
    output = pipe.chat(begun, GREEDY, continue_final_message=True, **THINKING)
    assert output.reasoning is not None and output.reasoning.strip() == "to me."
    assert output.text == ANSWER


def test_token_ids_keep_their_thought_in_the_text(pipe: Pipeline) -> None:
    prompt = pipe.engine.preprocessor.prepare(HELLO, **THINKING)
    output = pipe.generate(prompt.token_ids, GREEDY)
    assert output.text == f"{THOUGHT}\n</think>\n\n{ANSWER}" and output.reasoning is None


def test_the_parser_is_an_option_as_the_server_has_it(pipe: Pipeline) -> None:
    whole = f"{THOUGHT}\n</think>\n\n{ANSWER}"
    for parser, text, reasoning in (
        ("none", whole, None),
        ("deepseek_r1", ANSWER, THOUGHT),
        ("qwen3", ANSWER, THOUGHT),
    ):
        same = Pipeline.from_engine(pipe.engine, reasoning_parser=parser)
        output = same.chat(HELLO, GREEDY, **THINKING)
        assert (output.text, output.reasoning) == (text, reasoning), parser
    with pytest.raises(ConfigError, match="reasoning_parser must be one of"):
        Pipeline("demo", reasoning_parser="qwen4")


@pytest.mark.parametrize("parser", ["auto", "none", "deepseek_r1"])
def test_python_and_http_split_alike(parser: str) -> None:
    same = Pipeline("demo", CONFIG, reasoning_parser=parser)
    config = ServerConfig(port=0, idle_check=False, reasoning_parser=parser)
    form = StructuredOutputs(choice=("yes", "no"))
    cases: list[tuple[dict[str, Any], SamplingParams]] = [
        ({}, GREEDY),
        ({"max_tokens": 3}, replace(GREEDY, max_tokens=3)),
        ({"stop": ["me"]}, replace(GREEDY, stop=("me",))),
        (
            {"structured_outputs": {"choice": ["yes", "no"]}},
            replace(GREEDY, structured_outputs=form),
        ),
    ]
    with same, running(same.engine, config) as server:
        for options in ({}, THINKING):
            for fields, params in cases:
                body = {"max_tokens": 60, "temperature": 0, **fields, **options}
                message = ok(server.chat("Hello", **body))["choices"][0]["message"]
                output = same.chat(HELLO, params, **options)
                assert output.text == (message["content"] or ""), (fields, options)
                assert output.reasoning == message.get("reasoning"), (fields, options)


def test_the_answer_goes_back_with_its_thought(pipe: Pipeline) -> None:
    """The next turn hits behind the answer's text, as it does over HTTP."""
    output = pipe.chat(HELLO, GREEDY, **THINKING)
    message = {"role": "assistant", "content": output.text, "reasoning": output.reasoning}
    turn = [*HELLO, message, {"role": "user", "content": "What can you see?"}]
    again = pipe.chat(turn, GREEDY, **THINKING)
    text = pipe.engine.preprocessor.tokenizer.decode(again.prompt_token_ids)
    assert ANSWER in text and "</think>" not in text.partition(ANSWER)[2]


def test_outputs_can_be_pickled_and_printed(pipe: Pipeline) -> None:
    output = pipe.chat(HELLO, GREEDY, **THINKING)
    again: Output = pickle.loads(pickle.dumps(output))
    assert again == output and again.reasoning == THOUGHT
    assert f"reasoning={THOUGHT!r}" in repr(output)
