"""An answer whose beginning is forced is the undisturbed one, to the bits of its logits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from guesses import draft_freely
from make_checkpoint import make_checkpoint
from parity import tapped
from parity_cases import random_ids
from sweeps import quick

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.errors import InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.structured_outputs import StructuredOutputs

SPECS = {"dense": CheckpointSpec(), "moe": CheckpointSpec(num_experts=4)}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "three choices": {"temperature": 1.0, "top_p": 0.9, "n": 3},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "biases": {"logit_bias": {7: 5.0, 9: -100.0}, "temperature": 0.8},
    "bad words": {"min_tokens": 20, "bad_words": ("a", "the")},
    "stop string": {"stop": ("eq", "zzz"), "min_tokens": 5, "temperature": 1.0},
    "logprobs": {"logprobs": 3, "temperature": 0.5},
    "grammar": {"structured_outputs": StructuredOutputs(regex="([ab]{3}c){9}"), "max_tokens": 60},
    "thought": {"thinking_token_budget": 6, "n": 2, "temperature": 1.0},
    "experts": {"return_routed_experts": True, "n": 2, "temperature": 1.0},
}
ROOMY: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_memory": "64MiB"}


class Answer:
    """Gathers what an engine says to one prompt."""

    def __init__(self, choices: int) -> None:
        self.deltas: list[list[Delta]] = [[] for _ in range(choices)]
        self.done = threading.Event()

    def push(self, delta: Delta) -> None:
        self.deltas[delta.index].append(delta)
        if all(own and own[-1].finish_reason for own in self.deltas):
            self.done.set()

    def tokens(self, index: int) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas[index] for token in delta.token_ids)

    @property
    def visible(self) -> list[Any]:
        """Everything that is told of it, token by token, but what was found in the cache."""
        return [
            [
                (
                    replace(delta, usage=None, cache_report=None, routed_experts=None),  # type: ignore[arg-type]
                    None if delta.routed_experts is None else delta.routed_experts.tolist(),
                )
                for delta in own
            ]
            for own in self.deltas
        ]


def ask(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    forced: Sequence[Sequence[Sequence[int]]] | None = None,
) -> list[Answer]:
    answers = [Answer(each.n) for each in params]

    def submit() -> None:  # together, before the next step
        for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            given = forced[number] if forced is not None else ()
            push = answers[number].push
            engine.submit(prompt, each, push, forced=given, complete_experts=True)

    engine.call(submit)
    for answer in answers:
        assert answer.done.wait(120)
    return answers


def beginnings(answers: Sequence[Answer], seed: int) -> list[list[tuple[int, ...]]]:
    """Of every choice, anything from nothing to the whole."""
    rng = np.random.default_rng(seed)
    return [
        [
            answer.tokens(index)[: rng.integers(len(answer.tokens(index)) + 1)]
            for index in range(len(answer.deltas))
        ]
        for answer in answers
    ]


@pytest.fixture(scope="module", params=quick(SPECS, 1))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("resumed"), SPECS[request.param])


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Engine]:
    engine = Engine.from_checkpoint(str(checkpoint), EngineConfig(**ROOMY))
    yield engine
    engine.close()


def requests(engine: Engine) -> tuple[list[Prompt], list[SamplingParams]]:
    kinds = [
        kind for name, kind in KINDS.items() if name != "experts" or engine.spec.routing is not None
    ]
    opening = engine.preprocessor.tokenizer.encode("<think>")
    prompts = [
        engine.preprocessor.prepare_tokens(
            [
                *random_ids(30 + 9 * number, seed=number),
                *(opening if "thinking_token_budget" in kind else ()),
            ]
        )
        for number, kind in enumerate(kinds)
    ]
    fields = {"max_tokens": 40, "temperature": 0.0, "seed": 7}
    return prompts, [SamplingParams(**{**fields, **kind}) for kind in kinds]


@pytest.mark.parametrize(
    "options",
    [
        {},
        # Without drafts, which may have one end before another needs its room.
        {
            "cache_memory": "288KiB",
            "max_num_seqs": 3,
            "max_model_len": 160,
            "speculative": "off",
        },
        {"speculative": "suffix", "max_num_seqs": 5},
        {"compiled_kernels": False},
    ],
    ids=["roomy", "preempted", "drafts", "torch"],
)
def test_all_that_is_told_is_the_same(
    checkpoint: Path, plain: Engine, options: dict[str, Any]
) -> None:
    """Several at once, cold and then as hits, for every kind of request."""
    prompts, params = requests(plain)
    plain.flush()
    expected = ask(plain, prompts, params)
    engine = Engine.from_checkpoint(str(checkpoint), EngineConfig(**(ROOMY | options)))
    try:
        if options.get("speculative") == "suffix":
            draft_freely(engine)
        for turn in range(2):
            forced = beginnings(expected, turn)
            found = ask(engine, prompts, params, forced)
            for kind, ours, theirs in zip(params, found, expected, strict=True):
                if "compiled_kernels" not in options:
                    assert ours.visible == theirs.visible, kind
                for number, tokens in enumerate(forced[params.index(kind)]):
                    assert ours.tokens(number)[: len(tokens)] == tokens
            engine.check()
        stats = engine.stats()
        replays = stats["replays"]
        assert replays["tokens"] > 100
        assert replays["disagreements"] == 0 or "compiled_kernels" in options
        assert (stats["num_preemptions"] > 0) == (options.get("max_num_seqs") == 3)
    finally:
        engine.close()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("options", [{}, {"speculative": "suffix"}, {"dtype": "bfloat16"}])
def test_logits_have_the_bits_of_decoding(checkpoint: Path, options: dict[str, Any]) -> None:
    config = EngineConfig(**(ROOMY | options))
    params = [SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)] * 4
    engine = Engine.from_checkpoint(str(checkpoint), config)
    try:
        prepare = engine.preprocessor.prepare_tokens
        prompts = [prepare(random_ids(30 + 11 * number, seed=number)) for number in range(4)]
        with tapped(engine) as tap:
            expected = ask(engine, prompts, params)
            logits = tap.take()
        for _ in range(2):
            engine.flush()
            forced = [[answer.tokens(0)[:30]] for answer in expected]
            with tapped(engine) as tap:
                steps = engine.num_steps
                ask(engine, prompts, params, forced)
                for ours, theirs in zip(tap.take(), logits, strict=True):
                    assert torch.equal(ours, theirs)
            assert engine.num_steps - steps < 40, "one step for each token"
    finally:
        engine.close()


def test_an_aborted_replay_leaves_nothing(plain: Engine) -> None:
    prompts, params = requests(plain)
    forced = beginnings(ask(plain, prompts, params), 3)
    plain.flush()
    names = [
        plain.submit(prompt, each, lambda delta: None, forced=given)
        for prompt, each, given in zip(prompts, params, forced, strict=True)
    ]
    for name in names:
        plain.abort(name)
    plain.check()
    assert plain.num_running + plain.num_waiting == 0
    usage = plain.stats()["usage"]
    assert usage["blocks"] == usage["free_blocks"] + usage["cached_blocks"]


def test_bad_tokens_are_refused(plain: Engine) -> None:
    prompts, params = requests(plain)
    with pytest.raises(InvalidRequestError, match="forced: there are only 1 choices"):
        plain.submit(prompts[0], params[0], lambda delta: None, forced=((1,), (2,)))
    with pytest.raises(InvalidRequestError, match="forced: -1 is outside the vocabulary"):
        plain.submit(prompts[0], params[0], lambda delta: None, forced=((1, -1),))


@pytest.mark.usefixtures("compiler")
def test_several_ranks_replay_too(checkpoint: Path) -> None:
    config = EngineConfig(tensor_parallel_size=2, max_model_len=160, **ROOMY)
    engine = Engine.from_checkpoint(str(checkpoint), config)
    try:
        prompts, params = requests(engine)
        expected = ask(engine, prompts[:4], params[:4])
        engine.flush()
        forced = beginnings(expected, 1)
        found = ask(engine, prompts[:4], params[:4], forced)
        assert [answer.visible for answer in found] == [answer.visible for answer in expected]
        replays = engine.stats()["replays"]
        assert replays["tokens"] > 20 and replays["disagreements"] == 0
    finally:
        engine.close()
