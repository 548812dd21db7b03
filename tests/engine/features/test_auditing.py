"""Audits run hits again cold, judge by the near-tie rule, and leave no trace."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from letters import Letters
from make_checkpoint import make_checkpoint
from parity import executor_of, greedy
from parity_cases import photograph, random_ids, user
from serving import wait_for
from symbolic import make_prompt

from vlm_serve.engine.features.audits import MAX_PENDING, Auditor, judge
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.plan import SampledToken
from vlm_serve.engine.requests.request import Language, Request
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = CheckpointSpec(image_max_pixels=128 * 128)
    return make_checkpoint(tmp_path_factory.mktemp("audit"), spec)


def config(**options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 16,
        "cache_memory": "64MiB",
        "cache_audit": 1.0,
    }
    return EngineConfig(max_model_len=4096, **(settings | options))


@pytest.fixture
def pipe(checkpoint: Path) -> Iterator[Pipeline]:
    with Pipeline(checkpoint, config()) as pipeline:
        yield pipeline
        pipeline.engine.check()


def counts(pipe: Pipeline, results: int) -> dict[str, int]:
    """The counters once that many audits have ended, one way or another."""

    def audit() -> dict[str, int]:
        found: dict[str, int] = pipe.engine.stats()["audit"]
        return found

    wait_for(lambda: audit()["audits"] + audit()["dropped"] == results)
    return audit()


def test_a_right_hit_is_confirmed_and_nothing_is_left_behind(pipe: Pipeline) -> None:
    conversation = [user(photograph("coffee.png"), "What is this?")]
    pipe.chat(conversation, greedy(8))
    embeddings = len(pipe.engine._media.cache)  # an audit adds its own while it runs
    hit = pipe.chat(conversation, greedy(8))
    tree = pipe.engine.tree()
    requests = pipe.engine.stats()["cache"]["requests"]
    assert counts(pipe, 1) == {"audits": 1, "mismatches": 0, "near_ties": 0, "dropped": 0}
    assert hit.usage.cached_tokens > 0
    after = pipe.engine.tree()
    assert [node.key for node in after.nodes] == [node.key for node in tree.nodes]
    assert len(pipe.engine._media.cache) == embeddings
    assert pipe.engine.stats()["cache"]["requests"] == requests == 2
    assert pipe.engine.stats()["usage"]["rows"]["live"] == 0
    assert pipe.engine.num_running == pipe.engine.num_waiting == 0
    # The cold run did encode the picture: it would notice another picture's embedding.
    assert pipe.engine.stats()["num_encoded_spans"] == 2


@pytest.mark.parametrize("what", ["kv", "recurrent", "conv"])
def test_a_wrong_hit_is_noticed(
    pipe: Pipeline, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = random_ids(100, seed=1)
    pipe.generate(prompt, greedy(12))
    pool: torch.Tensor = executor_of(pipe.engine)._caches[what]
    pipe.engine.call(lambda: pool.copy_(torch.flip(pool, dims=(-2,)) * 3))
    with caplog.at_level(logging.ERROR, "vlm_serve.engine.features.audits"):
        wrong = pipe.generate(prompt, greedy(12))
        assert wrong.usage.cached_tokens == 96
        assert counts(pipe, 1) == {"audits": 1, "mismatches": 1, "near_ties": 0, "dropped": 0}
    assert "differs from the cold run" in caplog.text


def test_misses_and_sampled_answers_are_not_audited(pipe: Pipeline) -> None:
    prompt = random_ids(60, seed=2)
    pipe.generate(prompt, greedy(4))
    pipe.generate(prompt, SamplingParams(max_tokens=4, temperature=1.0, seed=1))
    pipe.generate(prompt, greedy(4, repetition_penalty=1.5))
    pipe.generate(prompt, greedy(4, n=2))
    assert counts(pipe, 1)["audits"] == 1


def test_callers_come_first(checkpoint: Path) -> None:
    """One seat: every audit runs when nobody needs the seat, or is given up."""
    prompts = [random_ids(60 + index, seed=3) for index in range(4)]
    with Pipeline(checkpoint, config(max_num_seqs=1)) as pipe:
        cold = [output.token_ids for output in pipe.generate_many(prompts, greedy(30))]
        eligible = pipe.engine._auditor._num_eligible
        for _ in range(3):
            hits = pipe.generate_many(prompts, greedy(30))
            assert [output.token_ids for output in hits] == cold
            eligible += len(prompts)
        assert counts(pipe, eligible)["mismatches"] == 0
        pipe.engine.check()


def test_no_audit_without_a_rate(checkpoint: Path) -> None:
    with Pipeline(checkpoint, config(cache_audit=0.0)) as pipe:
        for _ in range(2):
            pipe.generate(random_ids(40, seed=4), greedy(2))
        assert not pipe.engine._auditor._pending
        assert counts(pipe, 0)["audits"] == 0


def test_the_rule() -> None:
    row = {7: -0.5, 8: -0.50005, 9: -2.0}
    assert judge([1, 7], [1, 7], [{1: 0.0}, row]) == "equal"
    assert judge([1, 8], [1, 7], [{1: 0.0}, row]) == "near_tie"
    assert judge([1, 8, 3], [1, 7, 4], [{1: 0.0}, row, {4: 0.0}]) == "near_tie"
    assert judge([1, 9], [1, 7], [{1: 0.0}, row]) == "mismatch"
    assert judge([1, 99], [1, 7], [{1: 0.0}, row]) == "mismatch"
    assert judge([1, 7], [1], [{1: 0.0}]) == "mismatch"


def test_an_answer_that_was_given_its_beginning_is_judged_behind_it() -> None:
    """Other weights, or another server, may have said what it begins with."""
    auditor = Auditor(1.0)
    auditor.on_finished(ended_hit(0, forced=((9,),)))
    request = auditor.start()
    assert request is not None and request.forced == ((9,),)


def ended_hit(number: int, forced: tuple[tuple[int, ...], ...] = ()) -> SequenceGroup:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = make_prompt([(5, 6, 7, 8)], block_size=4)
    request = Request(f"r{number}", prompt, params, _ignore, arrival=number, forced=forced)
    group = SequenceGroup(
        request, itertools.count(number), Language(Letters(), frozenset(), 50, 64)
    )
    group.cached_tokens = 4
    group.sequences[0].accept(SampledToken(9, {}))
    assert group.finished
    return group


def _ignore(delta: Delta) -> None:
    pass


@pytest.mark.parametrize(
    ("rate", "chosen"),
    [(1.0, [0, 1, 2, 3, 4, 5, 6, 7]), (0.25, [3, 7]), (0.4, [2, 4, 7]), (0.0, [])],
)
def test_the_share_follows_from_counting(rate: float, chosen: list[int]) -> None:
    auditor = Auditor(rate)
    started = []
    for number in range(8):
        auditor.on_finished(ended_hit(number))
        request = auditor.start()
        if request is not None:
            started.append(request.arrival)
            request.on_delta(Delta(0, token_ids=(9,), logprobs=({9: 0.0},), finish_reason="length"))
    assert started == chosen
    assert auditor.counts.audits == len(chosen)


def test_what_piles_up_is_dropped_and_counted() -> None:
    auditor = Auditor(1.0)
    for number in range(MAX_PENDING + 3):
        auditor.on_finished(ended_hit(number))
    assert auditor.counts.dropped == 3
    request = auditor.start()
    assert request is not None and request.cold
    request.on_delta(Delta(0, finish_reason="abort"))
    assert auditor.counts.dropped == 4 and auditor.running is None
