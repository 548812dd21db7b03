"""Constraints on single rows, and in an engine that preempts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from letters import Letters
from symbolic import make_prompt
from together import together

from vlm_serve.engine.requests.plan import SampleTask
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.engine.steps.sampler import SequenceSampler, sample
from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar import state
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.structured_outputs import StructuredOutputs

GREEDY = SamplingParams(temperature=0.0)
LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0]])


def pick(
    history: tuple[int, ...] = (),
    *,
    banned: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    **options: Any,
) -> int:
    """The token after a prompt and a history that may not end yet."""
    params = replace(
        GREEDY, stop_token_ids=banned, min_tokens=len(history) + bool(banned), **options
    )
    request = Request("r", make_prompt([(1, 2)], block_size=4), params, print, bad_words=bad_words)
    group = SequenceGroup(request, itertools.count(), Language(Letters(), frozenset(), 4, 64))
    (constrained,) = group.sequences
    constrained.token_ids += history
    tasks = [constrained.sample_task(), SampleTask(1, len(history))]
    samplers = {
        0: SequenceSampler(constrained.info),
        1: SequenceSampler(replace(constrained.info, params=GREEDY)),
    }
    for sampler in samplers.values():
        sampler.replace(0, history)
    (one,), (plain,) = sample(LOGITS, tasks, samplers, [0, 0]).values()
    assert plain.token_id == 3  # the row itself has not been touched
    return one.token_id


def test_a_bias_is_added() -> None:
    assert pick(logit_bias={0: 4.0, 3: -100.0}) == 0


def test_only_allowed_tokens_are_sampled() -> None:
    assert pick(allowed_token_ids=(0, 1)) == 1


def test_the_last_token_of_a_bad_word_is_banned_after_the_others() -> None:
    words = ((1, 2, 3),)
    assert pick(bad_words=words) == 3  # the prompt, which ends in (1, 2), is no part of a bad word
    assert pick((1,), bad_words=words) == 3
    assert pick((2, 1), bad_words=words) == 3
    assert pick((0, 1, 2), bad_words=words) == 2


def test_what_is_allowed_wins_where_nothing_would_remain() -> None:
    assert pick(allowed_token_ids=(1,), bad_words=((1,),)) == 1
    assert pick(allowed_token_ids=(1,), banned=(1,)) == 1
    against: dict[str, Any] = {"logit_bias": {2: -100.0}, "repetition_penalty": 50.0}
    assert pick((2,), banned=(1, 2), allowed_token_ids=(1, 2), **against) == 2, "as they are"
    assert pick((2,), banned=(1,), allowed_token_ids=(1, 2), **against) == 2


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    # Room for about one and a half of the requests below: they preempt each other. Without drafts,
    # which may have one end before another needs its room.
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="512KiB",
        max_model_len=200,
        max_num_seqs=4,
        speculative="off",
    )
    with Pipeline("demo", config) as pipeline:
        yield pipeline


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_grammars_survive_preemption(pipeline: Pipeline) -> None:
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 99},
        "minItems": 20,
        "maxItems": 20,
    }
    form = StructuredOutputs(json=schema)
    params = [
        SamplingParams(temperature=1.0, seed=seed, structured_outputs=form) for seed in range(4)
    ]
    questions = [messages(f"Question {number}") for number in range(4)]
    alone = [pipeline.chat(q, p).text for q, p in zip(questions, params, strict=True)]
    with together(pipeline.engine, len(questions)):
        outputs = pipeline.chat_many(questions, params)
    for output in outputs:
        assert len(json.loads(output.text)) == 20
    assert [output.text for output in outputs] == alone
    assert pipeline.engine.stats()["num_preemptions"] > 0


def test_a_form_needs_exactly_one_kind() -> None:
    with pytest.raises(InvalidRequestError, match="exactly one"):
        StructuredOutputs(regex="a", json_object=True)
    with pytest.raises(InvalidRequestError, match="exactly one"):
        StructuredOutputs()


def test_one_request_is_ended_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any time to follow a grammar, the first token is already too late."""
    config = EngineConfig(device="cpu", cache_memory="32MiB", max_model_len=512, threads=1)
    ask = [{"role": "user", "content": "hi"}]
    slow = SamplingParams(max_tokens=8, n=2, structured_outputs=StructuredOutputs(regex="[ab]{8}"))
    plain = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with Pipeline("demo", config) as pipe:
        alone = pipe.chat(ask, plain).text
        monkeypatch.setattr(state, "FOLLOW_SECONDS", 0.0)
        monkeypatch.setattr(state, "FOLLOW_SECONDS_PER_TOKEN", 0.0)
        others = pipe.stream(ask, plain)
        begun = next(others).text
        with pytest.raises(InvalidRequestError, match="takes too long") as raised:
            pipe.chat(ask, slow)
        assert raised.value.code == "grammar_limit"
        assert begun + "".join(delta.text for delta in others) == alone
        pipe.engine.check()
        assert pipe.engine.num_running + pipe.engine.num_waiting == 0
