"""A thought ends after its budget of tokens, and stop strings wait for its end."""

from __future__ import annotations

import dataclasses
import json
import queue
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from together import together

from vlm_serve.engine.requests.detokenizer import Detokenizer
from vlm_serve.engine.requests.thought import Thought, ThoughtState
from vlm_serve.errors import InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.structured_outputs import StructuredOutputs

TEXTS = ["<think>", "</think>", "<tool_call>", "a", "b", "\n", "<", "/think>", "x</think>yz", "<th"]
OPEN, CLOSE, CALL, A, B, LINE, LESS, END, MIXED, PART = range(len(TEXTS))


class Texts:
    """A tokenizer whose tokens are the texts."""

    def token_bytes(self, token_id: int) -> bytes:
        return TEXTS[token_id].encode()

    def is_special(self, token_id: int) -> bool:
        return False


def state(*, budget: int | None = None, opened: bool = True, calls: bool = False) -> ThoughtState:
    return ThoughtState(Thought(opened, calls), Texts().token_bytes, budget, (B, CLOSE))


def forced(thought: ThoughtState, tokens: Sequence[int]) -> list[int | None]:
    """The forced token before each token and at the end."""
    found = [thought.forced]
    for token in tokens:
        thought.accept(token)
        found.append(thought.forced)
    return found


def test_a_thought_is_closed_after_its_budget() -> None:
    assert forced(state(budget=2), [A, A, B, CLOSE, A]) == [None, None, B, CLOSE, None, None]
    assert forced(state(budget=0), [B, CLOSE, A]) == [B, CLOSE, None, None]
    assert forced(state(budget=2), [A, CLOSE, A, A]) == [None] * 5
    assert forced(state(), [A] * 9) == [None] * 10


def test_a_thought_that_the_answer_opens_is_counted_from_there() -> None:
    tokens = [LINE, PART]
    thought = state(budget=1, opened=False)
    assert forced(thought, [LINE, OPEN, A, B, CLOSE]) == [None, None, None, B, CLOSE, None]
    assert forced(state(budget=0, opened=False), [A, OPEN, A]) == [None] * 4, "a word of the text"
    assert forced(state(budget=0, opened=False), tokens) == [None] * 3, "not yet a mark"


def test_the_end_may_lie_in_several_tokens_or_inside_one() -> None:
    thought = state(budget=9)
    assert [thought.accept(token) for token in (A, LESS, END, A)] == [1, 1, 7, 0]
    thought = state(budget=9)
    assert [thought.accept(token) for token in (CLOSE, LINE, LINE, A, LINE)] == [8, 1, 1, 0, 0]
    thought = state(budget=9, calls=True)
    assert [thought.accept(token) for token in (CALL, LINE)] == [11, 0], "a call's own line break"
    thought = state(budget=9)
    assert [thought.accept(token) for token in (A, MIXED, A)] == [1, len("x</think>"), 0]


def test_a_call_ends_a_thought_only_where_it_may() -> None:
    assert forced(state(budget=1, calls=True), [CALL, A]) == [None] * 3
    assert forced(state(budget=1), [CALL]) == [None, B]


def test_drafts_are_forgotten() -> None:
    thought = state(budget=2)
    thought.accept(A)
    with thought.ahead():
        assert forced(thought, [A, B, CLOSE]) == [None, B, CLOSE, None]
    assert forced(thought, [A]) == [None, B]


def test_quiet_text_ends_with_no_stop_string_but_those_about_its_mark() -> None:
    detokenizer = Detokenizer(Texts(), ("x", "yz", "a"), "</think>")
    assert detokenizer.push(A, quiet=1) == ("a", None)
    assert detokenizer.push(MIXED, quiet=len("x</think>")) == ("x</think>", "yz")
    detokenizer = Detokenizer(Texts(), ("x", "</think>"), "</think>")
    assert detokenizer.push(MIXED, quiet=len("x</think>")) == ("x", "</think>")


@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_a_budget_is_a_number_of_tokens(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="thinking_token_budget") as caught:
        SamplingParams(thinking_token_budget=value)
    assert caught.value.param == "thinking_token_budget"


MESSAGE = "\nTime is up."
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "three choices": {"temperature": 1.0, "n": 3, "logprobs": 0},
    "penalties": {"temperature": 0.7, "presence_penalty": 1.5, "logit_bias": {751: -100.0}},
    "nothing else allowed": {"temperature": 0.0, "allowed_token_ids": tuple(range(10, 60))},
}


@pytest.fixture(scope="module", params=["off", "suffix", "preempted"])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    tight = request.param == "preempted"
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="512KiB" if tight else "64MiB",
        max_model_len=200,
        max_num_seqs=4,
        speculative="off" if tight else request.param,
        thinking_budget_message=MESSAGE,
    )
    with Pipeline("demo", config) as pipeline:
        yield pipeline


def ask(pipeline: Pipeline, params: Sequence[SamplingParams]) -> list[Output]:
    questions = [[{"role": "user", "content": f"Question {n}"}] for n in range(len(params))]
    with together(pipeline.engine, len(questions)):
        return pipeline.chat_many(questions, params, chat_template_kwargs={"enable_thinking": True})


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_ends_thoughts(pipeline: Pipeline, kind: str) -> None:
    encode = pipeline.engine.preprocessor.tokenizer.encode
    closing = encode(MESSAGE) + encode("\n</think>")
    end = encode("</think>")[0]
    budgets = (0, 1, 7, 20)
    given = [
        SamplingParams(max_tokens=60, min_tokens=60, seed=3, thinking_token_budget=b, **KINDS[kind])
        for b in budgets
    ]
    for budget, output in zip(budgets, ask(pipeline, given), strict=True):
        for choice in output.choices:
            ids = choice.token_ids
            early = end in ids[:budget]
            assert early or ids[budget : budget + len(closing)] == closing
            assert len(ids) == 60
            if choice.logprobs is not None:
                assert all(token in row for token, row in zip(ids, choice.logprobs, strict=True))


def test_a_budget_that_is_not_reached_changes_nothing(pipeline: Pipeline) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, thinking_token_budget=100)
    plain = SamplingParams(max_tokens=30, temperature=0.0)
    assert ask(pipeline, [params])[0].token_ids == ask(pipeline, [plain])[0].token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_line_breaks_of_the_template_stand_before_a_form_and_stop_nothing(
    pipeline: Pipeline, kind: str
) -> None:
    """Also where the other rules forbid them."""
    encode = pipeline.engine.preprocessor.tokenizer.encode
    breaks, end = encode("\n\n"), encode("</think>")[0]
    given = [
        SamplingParams(
            max_tokens=60, seed=3, thinking_token_budget=7, **KINDS[kind],
            structured_outputs=StructuredOutputs(choice=("yes", "no")),
            stop=("\n\n", "\n"),
        )
        for _ in range(3)
    ]  # fmt: skip
    for output in ask(pipeline, given):
        for choice in output.choices:
            assert choice.text in ("yes", "no")
            at = choice.token_ids.index(end) + 1
            assert choice.token_ids[at : at + len(breaks)] == breaks


def test_stop_strings_begin_with_the_answer(pipeline: Pipeline) -> None:
    given = SamplingParams(max_tokens=60, temperature=0.0, thinking_token_budget=5)
    plain = ask(pipeline, [given])[0]
    stopped = ask(pipeline, [dataclasses.replace(given, stop=("\n\n", "\n"))])[0]
    assert plain.text and stopped.text == plain.text.split("\n")[0]


def test_a_grammar_begins_behind_a_closed_thought(pipeline: Pipeline) -> None:
    form = StructuredOutputs(json={"type": "array", "items": {"enum": [1, 2]}, "minItems": 3})
    params = SamplingParams(
        max_tokens=90, temperature=1.0, seed=1, structured_outputs=form, thinking_token_budget=5
    )
    engine = pipeline.engine
    prompt = engine.preprocessor.prepare(
        [{"role": "user", "content": "go"}], chat_template_kwargs={"enable_thinking": True}
    )
    grammar = engine.grammars.compile(form, b"</think>")
    deltas: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.submit(prompt, params, deltas.put, grammar=grammar, thought=Thought(True))
    text = ""
    while True:
        delta = deltas.get(timeout=60)
        text += delta.text
        if delta.finish_reason is not None:
            break
    thought, _, answer = text.partition("</think>")
    assert thought.endswith(MESSAGE + "\n")
    if delta.finish_reason == "stop":
        assert set(json.loads(answer)) <= {1, 2}
    assert answer.lstrip().startswith("[")


@pytest.mark.parametrize("thinking", [True, False])
def test_a_pipeline_enforces_the_form_behind_the_thought(
    pipeline: Pipeline, thinking: bool
) -> None:
    params = SamplingParams(
        max_tokens=60, temperature=1.0, seed=1, thinking_token_budget=5,
        structured_outputs=StructuredOutputs(choice=("yes",)),
    )  # fmt: skip
    template = {"enable_thinking": thinking}
    output = pipeline.chat(
        [{"role": "user", "content": "go"}], params, chat_template_kwargs=template
    )
    assert output.text == "yes"
    assert (output.reasoning is not None) == thinking
