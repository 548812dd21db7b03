"""Routed experts are those of transformers' router: cold, replayed, after preemption, forked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from parity import greedy
from parity_cases import random_ids
from together import together

from vlm_serve.errors import InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Choice, Output, Pipeline
from vlm_serve.sampling_params import SamplingParams

LAYERS, EXPERTS, TOP_K = 4, 8, 2
LOGIT_ERROR = 1e-3
"""Two experts this close are a tie: either may be chosen."""


SPECS = {
    "every layer": CheckpointSpec(num_layers=LAYERS, num_experts=EXPERTS, vision_depth=0, seed=5),
    "every second layer": CheckpointSpec(
        family="qwen3_vl", num_layers=2 * LAYERS, num_experts=EXPERTS, sparse_step=2, seed=5
    ),
}


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts"), SPECS[request.param])


def config(**options: object) -> EngineConfig:
    settings: dict[str, object] = {"dtype": "float32", "block_size": 16, "cache_memory": "64MiB"}
    return EngineConfig(**(settings | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pipe(checkpoint: Path) -> Iterator[Pipeline]:
    with Pipeline(checkpoint, config(max_model_len=2048)) as pipeline:
        yield pipeline


def asking(num_tokens: int, **options: object) -> SamplingParams:
    return greedy(num_tokens, return_routed_experts=True, **options)


@torch.no_grad()
def router_logits(checkpoint: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """What transformers' routers say: `[tokens, layers, experts]`."""
    output = oracle.model(checkpoint)(
        torch.tensor([token_ids]), use_cache=False, output_router_logits=True
    )
    return torch.stack([layer.float() for layer in output.router_logits], dim=1)


def expect(
    checkpoint: Path,
    prompt: Sequence[int],
    answer: Output | Choice,
    *,
    start: int = 0,
) -> None:
    """The rows name the reference's best experts, best first, outside of the gaps."""
    rows = answer.routed_experts
    assert rows is not None
    token_ids = [*prompt, *answer.token_ids]
    assert rows.shape == (len(token_ids) - 1 - start, LAYERS, TOP_K)
    assert rows.dtype == np.uint8
    reference = router_logits(checkpoint, token_ids)[start:-1]
    chosen = reference.gather(-1, torch.from_numpy(rows.astype(np.int64)))
    error = (chosen - reference.topk(TOP_K).values).abs().amax(dim=(1, 2))
    for first, last in answer.routed_experts_gaps:
        assert not rows[first - start : last - start].any()
        error[first - start : last - start] = 0
    assert float(error.max()) < LOGIT_ERROR
    assert all(len(set(ids)) == TOP_K for ids in rows[-1].tolist())


def test_rows_are_those_of_the_reference(pipe: Pipeline, checkpoint: Path) -> None:
    prompt = random_ids(100, seed=1)
    answer = pipe.generate(prompt, asking(20))
    expect(checkpoint, prompt, answer)
    assert answer.routed_experts_gaps == ()
    assert len(np.unique(rows_of(answer))) == EXPERTS, "the check above must be able to fail"


def test_rows_of_cached_tokens_are_replayed(pipe: Pipeline, checkpoint: Path) -> None:
    prompt = random_ids(100, seed=2)
    cold = pipe.generate(prompt, asking(12))
    hit = pipe.generate(prompt, asking(12))
    assert hit.usage.cached_tokens == 96
    assert hit.cache_report.experts_missing == 0 and hit.routed_experts_gaps == ()
    assert np.array_equal(rows_of(hit), rows_of(cold))
    longer = [*prompt, *cold.token_ids, *random_ids(30, seed=3)]
    further = pipe.generate(longer, asking(12))
    assert further.usage.cached_tokens >= 96
    expect(checkpoint, longer, further)


def rows_of(answer: Output | Choice) -> npt.NDArray[np.uint8]:
    assert answer.routed_experts is not None
    return answer.routed_experts


def test_nobody_who_did_not_ask_gets_rows(pipe: Pipeline) -> None:
    answer = pipe.generate(random_ids(20, seed=4), greedy(2))
    assert answer.routed_experts is None and answer.choices[0].routed_experts is None


def test_the_first_rows_of_the_prompt_may_be_left_out(pipe: Pipeline, checkpoint: Path) -> None:
    prompt = random_ids(40, seed=5)
    for start in (1, 16, 39):
        answer = pipe.generate(prompt, asking(3, routed_experts_prompt_start=start))
        expect(checkpoint, prompt, answer, start=start)


def test_an_answer_of_one_token_has_the_rows_of_its_prompt(
    pipe: Pipeline, checkpoint: Path
) -> None:
    for length in (1, 15, 16, 17):
        prompt = random_ids(length, seed=length)
        answer = pipe.generate(prompt, asking(1, n=2))
        for choice in answer.choices:
            expect(checkpoint, prompt, choice)


def test_best_effort_reports_the_gap_and_later_requests_fill_it(
    pipe: Pipeline, checkpoint: Path
) -> None:
    prompt = random_ids(100, seed=6)
    pipe.generate(prompt, greedy(1))
    gappy = pipe.generate(prompt, asking(4))
    assert gappy.usage.cached_tokens == gappy.cache_report.experts_missing == 96
    assert gappy.routed_experts_gaps == ((0, 96),)
    expect(checkpoint, prompt, gappy)
    partly = pipe.generate(prompt, asking(4, routed_experts_prompt_start=90))
    assert partly.routed_experts_gaps == ((90, 96),)
    expect(checkpoint, prompt, partly, start=90)


def test_complete_mode_computes_again_what_nobody_recorded(checkpoint: Path) -> None:
    prompt = random_ids(100, seed=7)
    with Pipeline(checkpoint, config(expert_replay="complete")) as pipe:
        pipe.generate(prompt, greedy(1))
        unasked = pipe.generate(prompt, greedy(1))
        assert unasked.usage.cached_tokens == 96
        filling = pipe.generate(prompt, asking(4))
        assert filling.usage.cached_tokens == 0
        assert filling.cache_report.reason == "experts_missing"
        assert filling.routed_experts_gaps == ()
        expect(checkpoint, prompt, filling)
        replayed = pipe.generate(prompt, asking(4))
        assert replayed.usage.cached_tokens == 96
        assert replayed.routed_experts_gaps == ()
        assert np.array_equal(rows_of(replayed), rows_of(filling))
        pipe.engine.check()


def test_requests_beside_one_that_asks_leave_rows_too(pipe: Pipeline, checkpoint: Path) -> None:
    """Capturing costs the same for the whole step, so nobody's rows are thrown away."""
    prompts = [random_ids(60, seed=8), random_ids(60, seed=9)]
    pipe.engine.flush()
    with together(pipe.engine, len(prompts)):
        first = pipe.generate_many(prompts, [asking(30), greedy(30)])
    assert first[1].routed_experts is None
    second = pipe.generate(prompts[1], asking(2))
    assert second.usage.cached_tokens == 48
    expect(checkpoint, prompts[1], second)


def test_after_preemption(pipe: Pipeline, checkpoint: Path) -> None:
    memory = pipe.engine.memory
    prompts = [random_ids(120, seed=20 + index) for index in range(4)]
    for snapshots in (0, 8):
        size = 40 * memory.block_bytes + snapshots * memory.snapshot_bytes
        # Without drafts, which may have one answer end before another needs its room.
        options = config(cache_memory=size, prefix_cache_state_budget=snapshots, speculative="off")
        with Pipeline(checkpoint, options) as crowded:
            with together(crowded.engine, len(prompts)):
                answers = crowded.generate_many(prompts, asking(80))
            assert crowded.engine.stats()["num_preemptions"] > 0
            crowded.engine.check()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.routed_experts_gaps == ()
            expect(checkpoint, prompt, answer)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_choices_have_rows_of_their_own(checkpoint: Path, max_num_seqs: int) -> None:
    """With room for one sequence the second choice starts from the cache instead of forking."""
    prompt = random_ids(50, seed=30)
    with Pipeline(checkpoint, config(max_num_seqs=max_num_seqs)) as pipe:
        params = SamplingParams(
            max_tokens=20, temperature=1.0, seed=3, n=2, ignore_eos=True, return_routed_experts=True
        )
        answer = pipe.generate(prompt, params)
    assert answer.choices[0].token_ids != answer.choices[1].token_ids
    for choice in answer.choices:
        assert choice.routed_experts_gaps == ()
        expect(checkpoint, prompt, choice)


def test_more_than_256_experts_need_wider_rows(tmp_path: Path) -> None:
    spec = CheckpointSpec(num_layers=4, num_experts=300, moe_intermediate_size=8, vision_depth=0)
    with Pipeline(make_checkpoint(tmp_path, spec), config()) as pipe:
        rows = pipe.generate(random_ids(200, seed=31), asking(8)).routed_experts
        again = pipe.generate(random_ids(200, seed=31), asking(8)).routed_experts
    assert rows is not None and rows.dtype == np.uint16
    assert 255 < rows.max() < 300
    assert again is not None and np.array_equal(rows, again)


def test_what_cannot_be_asked_for(pipe: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="less than the prompt"):
        pipe.generate([1, 2, 3], asking(1, routed_experts_prompt_start=3))
    with pytest.raises(InvalidRequestError, match="needs return_routed_experts"):
        SamplingParams(routed_experts_prompt_start=3)
    with pytest.raises(InvalidRequestError, match="at least 0"):
        asking(1, routed_experts_prompt_start=-1)
    with pytest.raises(InvalidRequestError, match="true or false"):
        SamplingParams(return_routed_experts="yes")  # type: ignore[arg-type]
    dense = make_checkpoint(tmp_path, CheckpointSpec(vision_depth=0))
    with (
        Pipeline(dense, config()) as other,
        pytest.raises(InvalidRequestError, match="no routed experts"),
    ):
        other.generate([1, 2, 3], asking(1))
