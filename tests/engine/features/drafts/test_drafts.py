"""Answers with drafts are those without, whatever is asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from exactness import next_turn_pairs
from guesses import Oracle, consult, draft_freely
from make_checkpoint import make_checkpoint
from parity import executor_of, tapped
from parity_cases import photograph, random_ids, user
from sweeps import quick
from together import together

from vlm_serve.engine.features.drafts.drafting import Drafting
from vlm_serve.engine.features.drafts.suffix import SuffixDrafter
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.structured_outputs import StructuredOutputs

SPECS = {
    "dense": CheckpointSpec(image_max_pixels=128 * 128, mtp=True),
    "moe": CheckpointSpec(image_max_pixels=128 * 128, num_experts=4, mtp=True),
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 3, "n": 2},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "biases": {"logit_bias": {7: 5.0, 9: -100.0}, "temperature": 0.8, "seed": 4},
    "bad words": {"min_tokens": 20, "bad_words": ("a", "the")},
    "stop string": {"stop": ("e", "zzz"), "min_tokens": 5},
    "logprobs": {"logprobs": 3, "temperature": 0.5, "seed": 5},
    "grammar": {"structured_outputs": StructuredOutputs(regex="([ab]{3}c){9}"), "max_tokens": 60},
    "allowed": {"allowed_token_ids": (5, 6, 7, 8), "temperature": 1.0, "seed": 6},
    "prompt logprobs": {"prompt_logprobs": 1},
}
ROOMY: dict[str, Any] = {"dtype": "float32", "block_size": 16, "max_model_len": 256}


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("drafted"), SPECS[request.param])


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Pipeline]:
    with Pipeline(checkpoint, EngineConfig(cache_memory="64MiB", **ROOMY)) as pipe:
        yield pipe


def params_of(kind: str, experts: bool) -> SamplingParams:
    fields = {"max_tokens": 40, "temperature": 0.0, **KINDS[kind]}
    return SamplingParams(return_routed_experts=experts, **fields)


def visible(output: Output) -> list[Any]:
    return [
        (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, choice.logprobs)
        for choice in output.choices
    ]


@pytest.mark.parametrize("mistakes", quick([0.0, 0.3], [0.3]))
@pytest.mark.parametrize(
    "options",
    quick(
        [
            {"cache_memory": "64MiB"},
            {"cache_memory": "320KiB", "max_num_seqs": 4},
            {"cache_memory": "64MiB", "speculative": "mtp"},
            {"cache_memory": "448KiB", "max_num_seqs": 4, "speculative": "mtp,suffix"},
        ],
        lambda options: options["cache_memory"] != "64MiB",
    ),
)
def test_answers_are_those_without(
    checkpoint: Path, plain: Pipeline, mistakes: float, options: dict[str, Any]
) -> None:
    """Every kind of request twice, cold and as hits, alone enough or preempting each other."""
    moe = plain.engine.spec.routing is not None
    prompts = [random_ids(40 + 9 * index, seed=index) for index in range(len(KINDS))]
    params = [params_of(kind, moe) for kind in KINDS]
    plain.engine.flush()
    expected = [plain.generate(*pair) for pair in zip(prompts, params, strict=True)]
    config = EngineConfig(
        **(ROOMY | {"speculative": "suffix", "prefix_cache_decode_state_interval": 16} | options)
    )
    with Pipeline(checkpoint, config) as pipe:
        oracle = Oracle(1, mistakes=mistakes, vocabulary=pipe.engine.spec.vocab_size)
        for prompt, output in zip(prompts, expected, strict=True):
            known = len(output.token_ids) // (2 if "mtp" in config.speculative else 1)
            oracle.tell(prompt, [choice.token_ids[:known] for choice in output.choices])
        consult(pipe.engine, oracle)
        for _ in range(2):
            with together(pipe.engine, len(prompts)):
                outputs = pipe.generate_many(prompts, params)
            for kind, ours, theirs in zip(KINDS, outputs, expected, strict=True):
                assert visible(ours) == visible(theirs), kind
                if moe:
                    for one, other in zip(ours.choices, theirs.choices, strict=True):
                        rows = [np.asarray(each.routed_experts) for each in (one, other)]
                        assert np.array_equal(rows[0], rows[1])
            pipe.engine.check()
        stats = pipe.engine.stats()
        counts = stats["drafts"]
        assert counts["draft_tokens"] > 100
        assert (counts["accepted_tokens"] < counts["draft_tokens"]) or not mistakes
        assert (stats["num_preemptions"] > 0) == ("max_num_seqs" in options)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accepted_tokens_have_the_bits_of_decoding(checkpoint: Path, dtype: str) -> None:
    """The logits that tokens were chosen from, in mixed company, with a picture too."""
    common = ROOMY | {"dtype": dtype, "cache_memory": "64MiB"}
    prompts = [random_ids(30 + 11 * index, seed=index) for index in range(5)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with Pipeline(checkpoint, EngineConfig(**common)) as pipe:
        assert pipe.engine.config.compiled_kernels
        with tapped(pipe.engine) as tap:
            expected = [pipe.generate(prompt, params) for prompt in prompts]
            logits = tap.take()
    with Pipeline(checkpoint, EngineConfig(speculative="suffix", **common)) as pipe:
        oracle = Oracle(2, mistakes=0.2, vocabulary=pipe.engine.spec.vocab_size)
        for prompt, output in zip(prompts, expected, strict=True):
            oracle.tell(prompt, [output.token_ids])
        consult(pipe.engine, oracle)
        for turn in range(2):
            with tapped(pipe.engine) as tap:
                with together(pipe.engine, len(prompts)):
                    outputs = pipe.generate_many(prompts, params)
                for ours, theirs in zip(tap.take(), logits, strict=True):
                    assert torch.equal(ours, theirs)
            assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
            assert all(bool(one.usage.cached_tokens) == bool(turn) for one in outputs[1:])
            assert any(one.usage.accepted_prediction_tokens for one in outputs)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("interval", [0, 16])
def test_a_next_turn_equals_a_cold_one(
    checkpoint: Path, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a speculating turn leaves in the cache: snapshots while decoding, and without them the
    state of the last block boundary."""
    config = EngineConfig(
        cache_memory="64MiB",
        prefix_cache_decode_state_interval=interval,
        speculative="suffix",
        **(ROOMY | {"max_model_len": 512}),
    )
    with Pipeline(checkpoint, config) as pipe:
        draft_freely(pipe.engine)
        executor, answered, folded = executor_of(pipe.engine), 0, list[Any]()
        run = executor.run

        def watched(plan: Any) -> Any:
            folded.extend(plan.partial_folds)
            return run(plan)

        monkeypatch.setattr(executor, "run", watched)
        for pair, tokens in next_turn_pairs(pipe, 12, seed=7, num_tokens=40):
            assert pair.same_bits and pair.same_tokens
            answered += tokens
        assert answered and pipe.engine.stats()["drafts"]["accepted_tokens"]
        assert interval or folded


def test_a_failed_step_costs_no_token(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that raise before and behind the forward, with drafts in them."""
    config = EngineConfig(cache_memory="64MiB", speculative="suffix", **ROOMY)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [random_ids(30 + 11 * index, seed=index) for index in range(3)]
    with Pipeline(checkpoint, config) as pipe:
        expected = [output.token_ids for output in pipe.generate_many(prompts, params)]
        pipe.engine.flush()
        executor, turns = executor_of(pipe.engine), itertools.count()
        run = executor.run

        def failing(plan: Any) -> Any:
            drafted = any(item.kind == "verify" for item in plan.slices)
            turn = next(turns) if drafted else 0
            if turn % 3 == 1:
                raise RuntimeError("before")
            output = run(plan)
            if turn % 3 == 2:
                raise RuntimeError("behind")
            return output

        monkeypatch.setattr(executor, "run", failing)
        oracle = Oracle(3, mistakes=0.2, vocabulary=pipe.engine.spec.vocab_size)
        for prompt, answer in zip(prompts, expected, strict=True):
            oracle.tell(prompt, [answer])
        consult(pipe.engine, oracle)
        outputs = pipe.generate_many(prompts, params)
        assert [output.token_ids for output in outputs] == expected
        assert next(turns) > 3
        pipe.engine.check()


def test_a_prediction_holds_as_far_as_it_is_right() -> None:
    """The demo model answers with text that its tokens come back from."""
    asked = [user(photograph("coffee.png"), "Who drew this?")]
    params = SamplingParams(max_tokens=30, temperature=0.0)
    with Pipeline("demo", EngineConfig(cache_memory="64MiB", speculative="suffix")) as pipe:
        draft_freely(pipe.engine)
        first = pipe.chat(asked, params)
        counts = [first.usage.accepted_prediction_tokens]
        for prediction in (first.text, "No. " + first.text, "Something else altogether."):
            pipe.engine._features.get(Drafting).drafters[0] = SuffixDrafter()  # type: ignore[union-attr]
            again = pipe.chat(asked, replace(params, prediction=prediction))
            assert again.token_ids == first.token_ids
            counts.append(again.usage.accepted_prediction_tokens)
    none, right, shifted, wrong = counts
    assert right >= len(first.token_ids) - 3 > 0 == none
    assert right >= shifted and wrong == 0
