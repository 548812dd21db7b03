"""On a real engine: what is asked beside its thread, and what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from guesses import draft_freely
from parity import greedy
from parity_cases import random_ids
from waiting import wait_for

from vlm_serve.engine.requests.outputs import Delta, FinishReason
from vlm_serve.errors import InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

CONFIG = EngineConfig(
    device="cpu", block_size=16, cache_memory="64MiB", max_model_len=2048, threads=1
)
MESSAGES = [{"role": "user", "content": "What is in the picture?"}]


@pytest.fixture(scope="module")
def pipe() -> Any:
    with Pipeline("demo", CONFIG) as opened:
        yield opened


class Turn:
    """A next turn that says what the test wants, when the test wants it."""

    kind = "chat"

    def __init__(self, shared: int | Exception) -> None:
        self.go = threading.Event()
        self.asked: list[tuple[str, tuple[int, ...], FinishReason]] = []
        self._shared = shared

    def shared(self, text: str, token_ids: Sequence[int], reason: FinishReason) -> int:
        self.asked.append((text, tuple(token_ids), reason))
        assert self.go.wait(60)
        if isinstance(self._shared, Exception):
            raise self._shared
        return self._shared


def saves(pipe: Pipeline) -> dict[str, int]:
    found: dict[str, int] = pipe.engine.stats()["cache"]["saves"]
    return found


def answer(pipe: Pipeline, turn: Turn, seed: int) -> list[int]:
    """An answer that ends with an end-of-turn token; returns prompt and answer."""
    end = pipe.engine.preprocessor.tokenizer.special_tokens["<|im_end|>"]
    prompt = pipe.engine.preprocessor.prepare_tokens(random_ids(40, seed))
    params = SamplingParams(max_tokens=40, min_tokens=20, temperature=0.0, logit_bias={end: 100.0})
    deltas: list[Delta] = []
    done = threading.Event()

    def take(delta: Delta) -> None:
        deltas.append(delta)
        if delta.finish_reason is not None:
            done.set()

    pipe.engine.submit(prompt, params, take, next_turn=turn)
    assert done.wait(60)
    tokens = [token for delta in deltas for token in delta.token_ids]
    wait_for(lambda: bool(turn.asked))
    text, asked, reason = turn.asked[0]
    assert (text, asked, reason) == ("".join(delta.text for delta in deltas), tuple(tokens), "stop")
    assert tokens[-1] == end
    return [*prompt.token_ids, *tokens]


def test_nothing_is_computed_before_it_is_known(pipe: Pipeline) -> None:
    pipe.engine.flush()
    turn = Turn(61)
    before, steps = saves(pipe).get("answer_end", 0), pipe.engine.num_steps
    tokens = answer(pipe, turn, 1)
    steps = pipe.engine.num_steps
    pipe.engine.check()
    assert pipe.engine.num_steps == steps and pipe.engine.num_running == 0
    turn.go.set()
    wait_for(lambda: saves(pipe).get("answer_end", 0) > before)
    assert pipe.engine.num_steps == steps + 1
    hit = pipe.generate([*tokens, 3, 4, 5], greedy(2))
    assert hit.usage.cached_tokens == len(tokens)
    assert hit.cache_report.answer_tokens == len(tokens) - 40


@pytest.mark.parametrize("shared", [40, InvalidRequestError("no"), ZeroDivisionError()])
def test_what_shares_nothing_or_fails_leaves_no_state(
    pipe: Pipeline, shared: int | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    pipe.engine.flush()
    turn = Turn(shared)
    before, steps = saves(pipe).get("answer_end", 0), pipe.engine.num_steps
    tokens = answer(pipe, turn, 2)
    steps = pipe.engine.num_steps
    turn.go.set()
    wait_for(lambda: pipe.engine.call(lambda: not pipe.engine._scheduler.queues.kept))
    wait_for(lambda: pipe.engine.call(lambda: not pipe.engine._cache.leases))
    assert saves(pipe).get("answer_end", 0) == before and pipe.engine.num_steps == steps
    assert pipe.generate([*tokens, 3], greedy(1)).usage.cached_tokens < len(tokens)
    assert ("could not be rendered" in caplog.text) == isinstance(shared, ZeroDivisionError)


def test_a_flush_drops_what_is_ending(pipe: Pipeline) -> None:
    pipe.engine.flush()
    turn = Turn(61)
    tokens = answer(pipe, turn, 3)
    pipe.engine.flush()
    turn.go.set()
    assert pipe.generate([*tokens, 3], greedy(1)).usage.cached_tokens == 0
    pipe.engine.check()


def test_a_plain_caller_sends_the_text_back(pipe: Pipeline) -> None:
    pipe.engine.flush()
    first = pipe.chat(MESSAGES, SamplingParams(max_tokens=60, min_tokens=12, temperature=0.0))
    following = [
        *MESSAGES,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And now?"},
    ]
    told = pipe.engine.preprocessor.prepare(MESSAGES).next_turn
    assert told is not None
    shared = told({"role": "assistant", "content": first.text}, first.token_ids)
    second = pipe.chat(following, greedy(1))
    whole = len(first.prompt_token_ids) + len(first.token_ids)
    assert (second.usage.cached_tokens == whole) == (shared >= whole)


@pytest.mark.parametrize("source", ["off", "suffix"])
def test_without_the_option_no_answer_s_state_is_kept(source: str, tmp_path: Path) -> None:
    """Keep only what a live row leaves without a copy; behind accepted drafts there is none."""
    from dataclasses import replace

    config = replace(CONFIG, prefix_cache_answer_ends="off", speculative=source)
    with Pipeline("demo", config) as pipe:
        if source != "off":
            draft_freely(pipe.engine)
        first = pipe.chat(MESSAGES, greedy(40))
        assert (first.usage.accepted_prediction_tokens > 0) == (source != "off")
        tokens = [*first.prompt_token_ids, *first.token_ids]
        hit = pipe.generate([*tokens, 3], greedy(1))
        left = "left" in saves(pipe)
        assert left or source != "off"
        beyond = hit.usage.cached_tokens >= len(first.prompt_token_ids)
        assert beyond == left
        assert not {"answer_end", "answer_part"} & saves(pipe).keys()
