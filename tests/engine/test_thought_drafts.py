"""Thoughts that end at their budget, with drafts: the tokens are those without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from guesses import Oracle, consult, draft_freely
from make_checkpoint import make_checkpoint
from rank_processes import on_ranks_of, rank_processes
from sweeps import quick
from together import together

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams

MESSAGE = "\nTime is up."
BUDGETS = (0, 1, 6, 7, 15, 100)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 3, "n": 2, "logprobs": 1},
    "penalties": {"temperature": 0.7, "seed": 4, "presence_penalty": 1.5},
    "stop string": {"temperature": 0.0, "stop": ("e", "zzz"), "min_tokens": 30},
    "hardly anything allowed": {"temperature": 0.0, "allowed_token_ids": (5, 6, 7)},
}
CONFIG = EngineConfig(
    device="cpu",
    dtype="float32",
    block_size=16,
    cache_memory="64MiB",
    max_model_len=256,
    prefix_cache_decode_state_interval=16,
    thinking_budget_message=MESSAGE,
    speculative="off",
    threads=1,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = CheckpointSpec(mtp=True, vision_depth=0)
    return make_checkpoint(tmp_path_factory.mktemp("thoughts"), spec)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Pipeline]:
    with Pipeline(checkpoint, CONFIG) as pipe:
        yield pipe


def cases(pipe: Pipeline, kind: str) -> list[tuple[list[int], SamplingParams]]:
    """A prompt that opens a thought, and a budget, each; the last one is not reached."""
    encode = pipe.engine.preprocessor.tokenizer.encode
    return [
        (
            encode(f"Question {budget}: a b a b a b<think>\n"),
            SamplingParams(max_tokens=40, thinking_token_budget=budget, **KINDS[kind]),
        )
        for budget in BUDGETS
    ]


def visible(outputs: list[Output]) -> list[Any]:
    return [
        (choice.token_ids, choice.text, choice.finish_reason, choice.logprobs)
        for output in outputs
        for choice in output.choices
    ]


def answers(pipe: Pipeline, kind: str) -> list[Output]:
    given = cases(pipe, kind)
    with together(pipe.engine, len(given)):
        found = pipe.generate_many([prompt for prompt, _ in given], [each for _, each in given])
    pipe.engine.check()
    return found


def check_ends(pipe: Pipeline, outputs: list[Output]) -> None:
    """Thoughts end where their budgets say, with the message."""
    encode = pipe.engine.preprocessor.tokenizer.encode
    closing, end = encode(MESSAGE) + encode("\n</think>"), encode("</think>")[0]
    reached = 0
    for budget, output in zip(BUDGETS, outputs, strict=True):
        for choice in output.choices:
            ids = choice.token_ids
            if end not in ids[:budget] and len(ids) > budget:
                assert ids[budget : budget + len(closing)] == closing
                reached += 1
    assert reached >= 4  # some answers end before


@pytest.mark.parametrize(
    ("drafts", "mistakes"),
    quick(
        [("mtp", 0.3), ("suffix", 0.3), ("suffix", 0.0), ("mtp", 0.0), ("mtp,suffix", 0.3)],
        [("mtp", 0.3), ("suffix", 0.3)],
        several=True,
    ),
)
def test_drafts_do_not_move_the_end(
    checkpoint: Path, plain: Pipeline, drafts: str, mistakes: float
) -> None:
    """Twice, cold and as hits; the oracle also drafts the closing tokens, and over the end."""
    with Pipeline(checkpoint, replace(CONFIG, speculative=drafts)) as pipe:
        oracle = Oracle(1, mistakes=mistakes, vocabulary=pipe.engine.spec.vocab_size)
        consult(pipe.engine, oracle)
        for kind in KINDS:
            plain.engine.flush()
            expected = answers(plain, kind)
            check_ends(plain, expected)
            for (prompt, _), output in zip(cases(plain, kind), expected, strict=True):
                oracle.tell(prompt, [choice.token_ids for choice in output.choices])
            for _ in range(2):
                assert visible(answers(pipe, kind)) == visible(expected), kind
        counts = pipe.engine.stats()["drafts"]
        assert counts["accepted_tokens"] > 100
        assert (counts["accepted_tokens"] < counts["draft_tokens"]) or not mistakes


@pytest.mark.parametrize("drafts", ["mtp", "suffix"])
def test_a_drafters_own_proposals(checkpoint: Path, plain: Pipeline, drafts: str) -> None:
    """What it proposes is free text, where the budget allows one token alone."""
    with Pipeline(checkpoint, replace(CONFIG, speculative=drafts)) as pipe:
        draft_freely(pipe.engine)
        for kind in KINDS:
            expected = visible(answers(plain, kind))
            for _ in range(2):
                assert visible(answers(pipe, kind)) == expected, kind
        assert pipe.engine.stats()["drafts"]["draft_tokens"] > 100


def test_on_two_ranks(checkpoint: Path) -> None:
    """With the same sums, drafts from texts change nothing; MTP drafts need a single rank."""
    config = replace(CONFIG, tensor_parallel_size=2)
    kinds = ("greedy", "sampled")
    with rank_processes(2) as processes:
        with on_ranks_of(processes, checkpoint, config) as pipe:
            expected = {kind: answers(pipe, kind) for kind in kinds}
            for each in expected.values():
                check_ends(pipe, each)
        with on_ranks_of(processes, checkpoint, replace(config, speculative="suffix")) as pipe:
            oracle = Oracle(1, mistakes=0.2, vocabulary=pipe.engine.spec.vocab_size)
            consult(pipe.engine, oracle)
            for kind, outputs in expected.items():
                for (prompt, _), output in zip(cases(pipe, kind), outputs, strict=True):
                    oracle.tell(prompt, [choice.token_ids[:30] for choice in output.choices])
                assert visible(answers(pipe, kind)) == visible(outputs), kind
            assert pipe.engine.stats()["drafts"]["accepted_tokens"] > 50
