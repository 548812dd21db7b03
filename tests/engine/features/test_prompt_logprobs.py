"""Log-probabilities of prompts: right, reused, and equal to the uncached ones to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from parity_cases import photograph, random_ids, user
from prepared_prompts import answer_prepared
from together import together

from vlm_serve.engine.features.prompt_logprobs import PromptLog
from vlm_serve.engine.requests.outputs import PromptLogprobs
from vlm_serve.engine.steps.prompt_rows import logprob_rows
from vlm_serve.errors import InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0]])


def reports(logits: torch.Tensor, tokens: list[int], top: int) -> tuple[PromptLogprobs, ...]:
    log = PromptLog(0, len(tokens) + 1, top)
    log.put(1, logprob_rows(logits, tokens, top))
    return log.report([9, *tokens])


def test_prompt_tokens_are_reported_with_their_rank() -> None:
    found = reports(LOGITS.repeat(40, 1), [3, 0] * 20, 2)
    expected = torch.log_softmax(LOGITS[0], dim=-1).tolist()
    assert [report.rank for report in found] == [1, 4] * 20
    assert found[0].logprobs == pytest.approx({3: expected[3], 2: expected[2]})
    assert found[39].logprobs == pytest.approx({0: expected[0], 3: expected[3], 2: expected[2]})


def test_of_equals_those_of_lower_ids_are_named() -> None:
    """So that the first two of five are the two that were asked for."""
    logits = torch.full((3, 500), -1.0)
    logits[0, [7, 90, 300]] = 2.0
    logits[1, [400, 11]] = 2.0
    for top in range(6):
        rows = logprob_rows(logits, [0, 1, 2], top)["ids"].tolist()
        assert rows == [
            [7, 90, 300, 0, 1, 2][:top],
            [11, 400, 0, 1, 2, 3][:top],
            [0, 1, 2, 3, 4, 5][:top],
        ]


@pytest.fixture(scope="module", params=["dense", "moe"])
def pipe(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compiler: None
) -> Iterator[Pipeline]:
    spec = CheckpointSpec(
        image_max_pixels=128 * 128, num_experts=8 if request.param == "moe" else 0
    )
    path = make_checkpoint(tmp_path_factory.mktemp("rows"), spec)
    # Room for a part of the requests below: they evict and preempt each other, the same way each
    # time without drafts.
    config = EngineConfig(
        dtype="float32",
        block_size=16,
        cache_memory="320KiB",
        max_model_len=352,
        max_num_seqs=4,
        speculative="off",
    )
    with Pipeline(path, config) as made:
        yield made


def asking(top: int = 1, start: int = 0, **options: Any) -> SamplingParams:
    settings = {"max_tokens": 1, "temperature": 0.0} | options
    return SamplingParams(prompt_logprobs=top, prompt_logprobs_start=start, **settings)


def test_four_choices_over_one_text_compute_it_once(pipe: Pipeline) -> None:
    pipe.engine.flush()
    document = random_ids(250, seed=1)
    outputs = [pipe.generate([*document, *random_ids(2, seed=n)], asking()) for n in range(4)]
    assert [output.usage.cached_tokens for output in outputs] == [0, 224, 224, 224]
    assert [output.cache_report.logprobs_reused for output in outputs] == [0, 239, 239, 239]
    assert outputs[1].cache_report.reason == "prompt_logprobs"


def test_only_the_rows_asked_for_are_computed(pipe: Pipeline) -> None:
    pipe.engine.flush()
    document = random_ids(250, seed=2)
    whole = pipe.generate([*document, 5, 6], asking(2))
    pipe.engine.flush()
    pipe.generate([*document, 7], asking(2, 250))
    part = pipe.generate([*document, 5, 6], asking(2, 250))
    assert part.usage.cached_tokens == 240
    assert part.prompt_logprobs is not None and whole.prompt_logprobs is not None
    assert part.prompt_logprobs == whole.prompt_logprobs[-2:]
    with pytest.raises(InvalidRequestError, match="less than the prompt's 5 tokens"):
        pipe.generate([1, 2, 3, 4, 5], asking(1, 5))
    with pytest.raises(InvalidRequestError, match="needs prompt_logprobs"):
        SamplingParams(prompt_logprobs_start=1)


def test_sampling_options_change_no_row(pipe: Pipeline) -> None:
    prompt = random_ids(60, seed=3)
    plain = pipe.generate(prompt, asking(3))
    pipe.engine.flush()
    options: dict[str, Any] = {"temperature": 2.0, "repetition_penalty": 1.5, "seed": 1}
    options["logit_bias"] = {3: 50.0}
    assert pipe.generate(prompt, asking(3, **options)).prompt_logprobs == plain.prompt_logprobs
    assert pipe.generate(prompt, asking(3)).prompt_logprobs == plain.prompt_logprobs


def test_pictures_and_choices_are_reported_as_ever(pipe: Pipeline) -> None:
    messages = [user(photograph("coffee.png"), "What is this?")]
    cold, again = (pipe.chat(messages, asking(2, n=3, max_tokens=4)) for _ in range(2))
    assert cold.prompt_logprobs == again.prompt_logprobs
    assert cold.prompt_logprobs is not None
    assert len(cold.prompt_logprobs) == cold.usage.prompt_tokens - 1
    assert again.cache_report.logprobs_reused > 0


def test_random_prompts_have_the_bits_of_cold_ones(pipe: Pipeline) -> None:
    """Prefixes are shared at random, between two tenants, with changing k and start, several
    requests at a time in a cache that is too small for them."""
    rng = random.Random(4)
    engine = pipe.engine
    reused = 0
    bases = [random_ids(rng.randint(20, 260), seed=n) for n in range(3)]
    for _ in range(20):
        prompts, params, salts = [], [], []
        for _ in range(rng.randint(1, 6)):
            base = rng.choice(bases)
            tail = random_ids(rng.randint(1, 40), seed=rng.getrandbits(20))
            prompts.append([*base[: rng.choice([len(base), rng.randint(5, len(base))])], *tail])
            start = rng.choice([0, 0, 0, len(prompts[-1]) - len(tail)])
            params.append(asking(rng.choice([0, 1, 5, 20]), start, max_tokens=rng.randint(1, 40)))
            salts.append(rng.choice(["", "tenant"]))
        outputs = run(pipe, prompts, params, salts)
        engine.check()
        for prompt, one, output in zip(prompts, params, outputs, strict=True):
            reused += output.cache_report.logprobs_reused
            assert output.prompt_logprobs == cold(pipe, prompt, one).prompt_logprobs
    assert reused > 200
    assert engine.stats()["num_preemptions"] > 0


def run(
    pipe: Pipeline, prompts: list[list[int]], params: list[SamplingParams], salts: list[str]
) -> list[Output]:
    prepare = pipe.engine.preprocessor.prepare_tokens
    made = [prepare(ids, cache_salt=salt) for ids, salt in zip(prompts, salts, strict=True)]
    with together(pipe.engine, len(made)):
        return answer_prepared(pipe, made, params)


def cold(pipe: Pipeline, prompt: list[int], params: SamplingParams) -> Output:
    """As nobody else's: under a salt of its own."""
    (output,) = run(pipe, [prompt], [params], [f"cold-{random.getrandbits(60)}"])
    assert output.cache_report.logprobs_reused == output.usage.cached_tokens == 0
    return output
