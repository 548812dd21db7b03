"""Calls with many prompts: one that fails costs the others nothing."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vlm_serve
from vlm_serve import EngineConfig, FailedItemsError, Pipeline, SamplingParams, StructuredOutputs
from vlm_serve.engine.engine import Engine
from vlm_serve.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineError,
    FieldError,
    InvalidRequestError,
    MediaFetchError,
    ModelNotFoundError,
    VlmServeError,
)

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
ANSWER = "Hello! Ask me about a picture or a video."
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
CONFIG = EngineConfig(cache_memory="64MiB", threads=1, max_model_len=512)


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline("demo", CONFIG) as made:
        yield made


def short(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def about(picture: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]
    return [{"role": "user", "content": parts}]


BAD: dict[str, tuple[Any, SamplingParams, type[Exception], str]] = {
    "no file": (about("nope.png"), GREEDY, MediaFetchError, "nope.png"),
    "no picture": (about(b"text"), GREEDY, InvalidRequestError, "not an image"),
    "no list": (5, GREEDY, InvalidRequestError, "messages must be a list"),
    "nothing": (None, GREEDY, InvalidRequestError, "messages must not be empty"),
    "no role": ([{"content": "x"}], GREEDY, InvalidRequestError, r"messages\[0\].role"),
    "too long": (
        [{"role": "user", "content": "word " * 3000}],
        GREEDY,
        InvalidRequestError,
        "context length is 512",
    ),
    "too long an answer": (
        HELLO,
        SamplingParams(max_tokens=600),
        ContextLengthError,
        "context length is 512",
    ),
    "parameter": (HELLO, SamplingParams(logprobs=500), InvalidRequestError, "logprobs"),
    "token": (HELLO, SamplingParams(stop_token_ids=(10**6,)), InvalidRequestError, "stop_token"),
    "grammar": (
        HELLO,
        SamplingParams(structured_outputs=StructuredOutputs(grammar="start: (")),
        InvalidRequestError,
        "the grammar cannot be compiled",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_one_bad_conversation_costs_the_others_nothing(pipe: Pipeline, name: str) -> None:
    bad, params, kind, said = BAD[name]
    with pytest.raises(kind, match=said):
        pipe.chat(bad, params)
    conversations, each = [HELLO, bad, HELLO], [GREEDY, params, GREEDY]
    with pytest.raises(
        FailedItemsError, match="1 of 3 prompts failed.* index 1: .*" + said
    ) as caught:
        pipe.chat_many(conversations, each)
    first, none, last = caught.value.outputs
    assert first is not None and last is not None and none is None
    assert first.text == last.text == ANSWER
    (error,) = caught.value.errors.values()
    assert [*caught.value.errors] == [1] and isinstance(error, kind)
    assert caught.value.__cause__ is error
    with pytest.raises(InvalidRequestError):
        pipe.chat_many(conversations, each)
    given = pipe.chat_many(conversations, each, errors="return")
    assert [type(one) for one in given] == [type(first), type(error), type(first)]
    assert pipe.engine.num_running == pipe.engine.num_waiting == 0


def test_a_failed_step_is_its_prompt_s_alone(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, count = Engine.submit, iter(range(9))

    def failing(self: Engine, prompt: Any, params: Any, on_delta: Any, **options: Any) -> str:
        def receive(delta: Any) -> None:
            on_delta(
                vlm_serve.Delta(0, finish_reason="error", error=EngineError("the step failed"))
            )

        return submit(self, prompt, params, on_delta if next(count) != 1 else receive, **options)

    monkeypatch.setattr(Engine, "submit", failing)
    with pytest.raises(FailedItemsError, match="index 1: the step failed") as caught:
        pipe.chat_many([HELLO] * 3, SamplingParams(temperature=0.0, max_tokens=1))
    assert isinstance(caught.value.errors[1], EngineError)
    assert [each is None for each in caught.value.outputs] == [False, True, False]


def test_several_failures_are_counted_and_the_first_is_told(pipe: Pipeline) -> None:
    many = [about("a.png"), HELLO, about("b.png"), HELLO]
    with pytest.raises(
        FailedItemsError, match="2 of 4 prompts failed.* index 0: .*a.png"
    ) as caught:
        pipe.chat_many(many, GREEDY)
    assert [*caught.value.errors] == [0, 2]
    again: FailedItemsError = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.outputs == caught.value.outputs
    assert [str(each) for each in again.errors.values()] == [
        str(each) for each in caught.value.errors.values()
    ]


@pytest.mark.parametrize(
    "error",
    [
        FieldError("a.b", "is wrong", code="c"),
        ContextLengthError.beyond(5, "9", "too much", "messages"),
        MediaFetchError("no", param="x"),
        VlmServeError("no"),
    ],
)
def test_errors_can_be_pickled(error: VlmServeError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and again.args == error.args
    assert again.__dict__ == error.__dict__


def test_the_short_form_and_token_ids_do_alike(pipe: Pipeline) -> None:
    wrong: Any = [("Hello", "nope.png"), 5]
    with pytest.raises(FailedItemsError) as caught:
        pipe(["Hello", *wrong], GREEDY)
    assert [*caught.value.errors] == [1, 2] and caught.value.outputs[0].text == ANSWER
    assert "the short form is text" in str(caught.value.errors[2])
    first, *others = pipe(["Hello", *wrong], GREEDY, errors="return")
    assert not isinstance(first, Exception) and all(isinstance(each, Exception) for each in others)

    prompts: Any = [[5, 6, 7], [], [10**9], [5, 6, 7]]
    with pytest.raises(FailedItemsError, match="2 of 4 .* index 1: .*non-empty") as caught:
        pipe.generate_many(prompts, short(2))
    assert caught.value.outputs[0].token_ids == caught.value.outputs[3].token_ids
    returned = pipe.generate_many(prompts, short(2), errors="return")
    assert [isinstance(each, Exception) for each in returned] == [False, True, True, False]


def test_an_unknown_adapter_in_a_list_is_its_prompt_s_alone(pipe: Pipeline) -> None:
    with pytest.raises(FailedItemsError, match="index 1: no adapter 'x' is loaded") as caught:
        pipe.chat_many([HELLO, HELLO], GREEDY, lora=[None, "x"])
    assert caught.value.outputs[0].text == ANSWER
    with pytest.raises(ModelNotFoundError):
        pipe.chat_many([HELLO, HELLO], GREEDY, lora="x")


@pytest.mark.parametrize(
    "ask",
    [
        lambda pipe, given: pipe.chat_many([HELLO] * 2, given),
        lambda pipe, given: pipe.generate_many([[5], [6]], given),
        lambda pipe, given: pipe(["Hello"] * 2, given),
    ],
)
def test_params_of_another_length_are_an_error_of_the_call(
    pipe: Pipeline, ask: Callable[[Pipeline, Any], Any]
) -> None:
    for given, said in (
        ([GREEDY], "1 SamplingParams for 2 prompts"),
        ([GREEDY, None], "params must be a SamplingParams"),
        ({"max_tokens": 3}, "params must be a SamplingParams"),
    ):
        with pytest.raises(InvalidRequestError, match=said) as caught:
            ask(pipe, given)
        assert not isinstance(caught.value, FailedItemsError)


def test_what_is_wrong_with_the_call_is_no_failure_of_an_item(pipe: Pipeline) -> None:
    wrong: Any
    for wrong in ("Hello", {"role": "user"}, 5, None):
        with pytest.raises(InvalidRequestError, match="conversations must be a list"):
            pipe.chat_many(wrong)
        with pytest.raises(InvalidRequestError, match="prompts must be a list"):
            pipe.generate_many(wrong)
    wrong = "ignore"
    with pytest.raises(InvalidRequestError, match='errors must be "raise" or "return"'):
        pipe.chat_many([HELLO], errors=wrong)
    with pytest.raises(
        InvalidRequestError, match=r"max_tokens belongs to params: SamplingParams\("
    ):
        pipe.chat_many([HELLO], max_tokens=3)
    with pytest.raises(
        InvalidRequestError, match="no option 'cache_slat'; did you mean cache_salt"
    ):
        pipe.chat(HELLO, cache_slat="x")
    with pytest.raises(InvalidRequestError, match="started without --task|start another one"):
        pipe.embed(["a"])


def test_any_iterable_is_a_list(pipe: Pipeline) -> None:
    chats = (HELLO for _ in range(2))
    assert [each.text for each in pipe.chat_many(chats, GREEDY)] == [ANSWER] * 2
    params = (GREEDY for _ in range(2))
    assert [each.text for each in pipe.chat_many(iter([HELLO, HELLO]), params)] == [ANSWER] * 2
    assert [each.text for each in pipe(iter(["Hello"]), GREEDY)] == [ANSWER]
    assert len(pipe.generate_many(np.array([[5, 6], [7, 8]]), short(1))) == 2
    assert pipe.chat_many(iter(())) == pipe.chat_many([]) == pipe.chat_many([], []) == []


class Asked:
    """Reads conversations one by one and notes how many were read ahead of those that ended.

    Attributes:
        given, ended: how many so far.
        ahead: the most that were given and had not ended.
    """

    def __init__(self, conversations: Iterable[Any]) -> None:
        self._conversations = conversations
        self.given = self.ended = self.ahead = 0

    def __iter__(self) -> Iterator[Any]:
        for conversation in self._conversations:
            self.given += 1
            self.ahead = max(self.ahead, self.given - self.ended)
            yield conversation


def test_answers_come_as_they_end() -> None:
    bad = about("nope.png")
    config = EngineConfig(cache_memory="64MiB", threads=1, max_num_seqs=2)
    with Pipeline("demo", config) as made:
        asked = Asked([bad if index % 10 == 3 else HELLO for index in range(40)])
        results = {}
        for index, result in made.chat_many(asked, short(2), as_completed=True):
            assert index not in results
            asked.ended += 1
            results[index] = result
        assert asked.ahead <= 2 * 2, "no more are read than can be open"
        assert sorted(results) == [*range(40)]
        failed = [i for i, result in results.items() if isinstance(result, MediaFetchError)]
        assert sorted(failed) == [3, 13, 23, 33]
        texts = {result.text for result in results.values() if not isinstance(result, Exception)}
        assert texts == {"Hello!"}
        long = [short(2), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)]
        order = [i for i, _ in made.chat_many([HELLO] * 2, long[::-1], as_completed=True)]
        assert order == [1, 0], "the short one ends first"


def test_leaving_the_loop_aborts_what_is_open(pipe: Pipeline) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    ended = pipe.chat_many([HELLO, about("nope.png"), HELLO], endless, as_completed=True)
    index, error = next(ended)
    assert index == 1 and isinstance(error, MediaFetchError)
    ended.close()  # type: ignore[attr-defined]
    assert pipe.chat(HELLO, GREEDY).text == ANSWER
    assert pipe.engine.num_running == pipe.engine.num_waiting == 0


def test_an_iterator_that_fails_aborts_what_is_open(pipe: Pipeline) -> None:
    def broken() -> Iterator[Any]:
        yield HELLO
        raise OSError("the list of pictures cannot be read")

    with pytest.raises(OSError, match="list of pictures"):
        pipe.chat_many(broken(), SamplingParams(max_tokens=400, ignore_eos=True))
    assert pipe.chat(HELLO, GREEDY).text == ANSWER
    assert pipe.engine.num_running == pipe.engine.num_waiting == 0


def test_a_bar_moves(pipe: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    given = [HELLO, about("nope.png"), HELLO]
    pipe.chat_many(given, short(1), errors="return", progress=True)
    shown = capsys.readouterr().err
    assert "0/3" in shown and "3/3" in shown and "failed=1" in shown
    pipe.generate_many(iter([[5]]), short(1), progress=True)
    assert "1prompt" in capsys.readouterr().err, "the length of a generator is unknown"


def test_an_interrupt_ends_all(pipe: Pipeline) -> None:
    """Ctrl-C is no failure of one prompt."""
    started = threading.Event()
    submit = pipe.engine.submit

    def noticed(*given: Any, **options: Any) -> str:
        started.set()
        return submit(*given, **options)

    def interrupt() -> None:
        started.wait(60)
        signal.raise_signal(signal.SIGINT)

    pipe.engine.submit = noticed  # type: ignore[method-assign]
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pipe.chat_many([HELLO] * 20, SamplingParams(max_tokens=400, ignore_eos=True))
    finally:
        pipe.engine.submit = submit  # type: ignore[method-assign]
    assert pipe.chat(HELLO, GREEDY).text == ANSWER
    assert pipe.engine.num_running == pipe.engine.num_waiting == 0


def test_an_engine_that_ends_leaves_the_answers_so_far() -> None:
    with Pipeline("demo", CONFIG) as made:
        submit, count = made.engine.submit, iter(range(9))

        def closing(*given: Any, **options: Any) -> str:
            if next(count) == 1:
                made.engine.close()
            return submit(*given, **options)

        made.engine.submit = closing  # type: ignore[method-assign]
        chats = [HELLO, HELLO]
        with pytest.raises(FailedItemsError) as caught:
            made.chat_many(chats, GREEDY)
        assert isinstance(caught.value.errors[1], EngineClosedError)


def test_embeddings_and_scores_do_alike(tmp_path: Path) -> None:
    with Pipeline("demo", EngineConfig(task="embed", cache_memory="64MiB", threads=1)) as embedder:
        wrong: Any = ["red", 5, [{"type": "image", "image": "nope.png"}], "red"]
        with pytest.raises(FailedItemsError, match="index 1: a content must be") as caught:
            embedder.embed(wrong)
        first, *_, last = caught.value.outputs
        assert np.array_equal(first, last) and np.linalg.norm(first) == pytest.approx(1.0)
        assert [*caught.value.errors] == [1, 2]
        given: list[Any] = embedder.embed(wrong, errors="return")
        assert np.array_equal(given[0], first) and isinstance(given[2], MediaFetchError)
        assert len(embedder.embed(text for text in ("a", "b"))) == 2
