"""The engine answers as transformers does: cold, and after every kind of hit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import SPECS as ALL_SPECS
from make_checkpoint import make_checkpoint
from parity import Comparison, Messages, check, greedy
from parity_cases import SYSTEM, assistant, conversations, photograph, random_ids, user
from sweeps import quick

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.start.build import build
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline

# transformers' processor counts a tensor's numbers with numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
TOKENS = 64
SPECS = {
    name: ALL_SPECS[name]
    for name in (
        "dense",
        "dense, equal heads, one kv head",
        "moe, three value heads, four kv heads",
        "attention alone, no state",
        "text",
        "vl",
        "vl moe, every second layer dense",
        "next, three value heads, dense layers",
        "qwen3, tied, three heads of a kv head",
        "qwen3 moe, every second layer dense",
        "minicpm",
        "minicpm on a canvas",
    )
}
KINDS = {name: conversations(media=spec.vision_depth > 0) for name, spec in SPECS.items()}
QUICK = "dense"
"""The checkpoint that every test of `make test` takes."""
with_media = pytest.mark.parametrize(
    "checkpoint",
    quick([name for name in SPECS if SPECS[name].vision_depth], [QUICK]),
    indirect=True,
)


@pytest.fixture(scope="module", params=quick(SPECS, [QUICK]))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    return make_checkpoint(folder / request.param.replace(" ", "-"), SPECS[request.param])


@pytest.fixture
def known(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """Conversations that the checkpoint can take."""
    return KINDS[request.node.callspec.params["checkpoint"]]


def config(**options: object) -> EngineConfig:
    settings: dict[str, object] = {
        "dtype": "float32",
        "block_size": 16,
        "cache_memory": "256MiB",
        "max_model_len": 8192,
    }
    return EngineConfig(**(settings | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pipe(checkpoint: Path) -> Iterator[Pipeline]:
    with Pipeline(checkpoint, config()) as pipeline:
        yield pipeline


def expect(comparisons: list[Comparison]) -> None:
    for comparison in comparisons:
        assert comparison.acceptable, "another token, and no near tie"
        assert comparison.logit_error <= comparison.allowed


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    quick(
        [(checkpoint, name) for checkpoint, known in KINDS.items() for name in known],
        lambda case: case[0] == QUICK or case[1] in ("everything", "turns"),
        several=True,
    ),
    indirect=["checkpoint"],
)
def test_cold_then_identical(
    pipe: Pipeline, checkpoint: Path, known: dict[str, Any], name: str
) -> None:
    pipe.engine.flush()
    outputs, comparisons = check(pipe, checkpoint, [known[name]], TOKENS)
    expect(comparisons)
    assert outputs[0].usage.cached_tokens == 0
    outputs, comparisons = check(pipe, checkpoint, [known[name]], TOKENS)
    expect(comparisons)
    hit = outputs[0]
    assert hit.usage.cached_tokens >= len(hit.prompt_token_ids) - 2 * 16
    assert hit.cache_report.media_encoded == 0 and hit.cache_report.media_decoded == 0


def test_a_batch_of_eight(pipe: Pipeline, checkpoint: Path, known: dict[str, Any]) -> None:
    pipe.engine.flush()
    prompts: list[Messages | list[int]] = [*list(known.values())[:7], random_ids(77, 1)]
    expect(check(pipe, checkpoint, prompts, TOKENS)[1])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 257, 3000])
def test_prompts_of_many_lengths(pipe: Pipeline, checkpoint: Path, length: int) -> None:
    expect(check(pipe, checkpoint, [random_ids(length, seed=length)], 16)[1])


@with_media
def test_another_question_about_the_same_picture(pipe: Pipeline, checkpoint: Path) -> None:
    pipe.engine.flush()
    picture = photograph("coffee.png")
    first, second = ([user(picture, q)] for q in ("What is this?", "How hot might it be?"))
    expect(check(pipe, checkpoint, [first], TOKENS)[1])
    outputs, comparisons = check(pipe, checkpoint, [second], TOKENS)
    expect(comparisons)
    assert outputs[0].usage.cached_tokens >= media_end(pipe, outputs[0])
    assert outputs[0].cache_report.media_encoded == 0


@with_media
def test_a_picture_under_text_that_was_cached_without_one(pipe: Pipeline, checkpoint: Path) -> None:
    pipe.engine.flush()
    question = "What can be seen in the picture that I am about to show you, in a few words?" * 3
    expect(check(pipe, checkpoint, [[user(question)]], TOKENS)[1])
    outputs, comparisons = check(
        pipe, checkpoint, [[user(question, photograph("rocket.jpg"))]], TOKENS
    )
    expect(comparisons)
    assert outputs[0].cache_report.media_encoded == 1


@with_media
def test_several_turns(pipe: Pipeline, checkpoint: Path) -> None:
    pipe.engine.flush()
    history = [SYSTEM, user(photograph("camera.png"), "Who is this?")]
    for question in ("What does he wear?", "And the weather?", "Is it day or night?"):
        outputs, comparisons = check(pipe, checkpoint, [history], TOKENS)
        expect(comparisons)
        history = [*history, assistant("It is hard to tell from here."), user(question)]
    outputs, comparisons = check(pipe, checkpoint, [history], TOKENS)
    expect(comparisons)
    assert outputs[0].usage.cached_tokens > media_end(pipe, outputs[0])


def test_a_junction_heals_on_the_second_request(checkpoint: Path) -> None:
    """Two prompts share 100 tokens; no snapshot lies at the fork until the second one makes it.
    Without state layers KV alone is enough."""
    shared = random_ids(100, seed=5)
    tails = [random_ids(40, seed=6 + index) for index in range(3)]
    with Pipeline(checkpoint, config(prefix_cache_state_interval=1000)) as pipe:
        outputs = []
        for tail in tails:
            answers, comparisons = check(pipe, checkpoint, [shared + tail], TOKENS)
            expect(comparisons)
            outputs += answers
        second = 0 if pipe.engine.memory.num_live_rows else 96
    assert [output.usage.cached_tokens for output in outputs] == [0, second, 96]
    assert outputs[1].cache_report.kv_boundary == 96


def small(pipe: Pipeline, blocks: int, snapshots: int) -> EngineConfig:
    """Options for pools of that many KV blocks and snapshot rows."""
    memory = pipe.engine.memory
    total = blocks * memory.block_bytes + snapshots * memory.snapshot_bytes
    return config(cache_memory=total, prefix_cache_state_budget=snapshots)


def test_after_eviction(pipe: Pipeline, checkpoint: Path, known: dict[str, Any]) -> None:
    """A pool for one and a half conversations: everything is evicted again and again."""
    names, blocks = ["one image", "several turns", "text"], 110
    if "one image" not in known:
        names, blocks = list(known), 62
    elif checkpoint.name.startswith("minicpm"):
        blocks = 20
    with Pipeline(checkpoint, small(pipe, blocks, 4)) as crowded:
        for name in names * 2:
            expect(check(crowded, checkpoint, [known[name]], 16)[1])
        evictions = crowded.engine.stats()["cache"]["evictions"]
        assert evictions["kv"]
        assert bool(evictions.get("snapshot")) == bool(crowded.engine.memory.snapshot_bytes)


@pytest.mark.parametrize("snapshots", [0, 8])
def test_after_preemption(pipe: Pipeline, checkpoint: Path, snapshots: int) -> None:
    """Four answers grow beyond the pool: the last ones are preempted and resume exactly."""
    prompts = [random_ids(120, seed=20 + index) for index in range(4)]
    # Without drafts, which may have one answer end before another needs its room.
    options = replace(small(pipe, 40, snapshots), speculative="off")
    with Pipeline(checkpoint, options) as crowded:
        expect(check(crowded, checkpoint, prompts, 80)[1])
        assert crowded.engine.stats()["num_preemptions"] > 0


def test_a_budget_smaller_than_the_prompt(checkpoint: Path, known: dict[str, Any]) -> None:
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 4}
    longest = known["one image" if "one image" in known else "words"]
    with Pipeline(checkpoint, config(**options)) as pipe:
        expect(check(pipe, checkpoint, [longest, random_ids(300, 3)], 16)[1])


@with_media
def test_nan_in_everything_freed_reaches_no_result(
    pipe: Pipeline, checkpoint: Path, known: dict[str, Any]
) -> None:
    parts = build(str(checkpoint), small(pipe, 110, 4), poison=True)
    with Pipeline.from_engine(Engine(parts)) as poisoned:
        for name in ("one image", "several turns", "one image", "text", "several turns"):
            expect(check(poisoned, checkpoint, [known[name]], 16)[1])


def test_choices_fork_from_one_prompt(pipe: Pipeline) -> None:
    single = pipe.generate(random_ids(50, 9), greedy(12))
    forked = pipe.generate(random_ids(50, 9), greedy(12, n=3))
    assert [choice.token_ids for choice in forked.choices] == [single.token_ids] * 3
    assert forked.usage.completion_tokens == 36
    pipe.engine.check()


def media_end(pipe: Pipeline, output: Output) -> int:
    """Position after the last placeholder token of a prompt."""
    find = pipe.engine.preprocessor.tokenizer.token_to_id
    pads = {find("<|image_pad|>"), find("<|video_pad|>")}
    return 1 + max(i for i, token in enumerate(output.prompt_token_ids) if token in pads)
