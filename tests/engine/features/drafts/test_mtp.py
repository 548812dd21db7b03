"""The checkpoint's layer for drafts: what it drafts depends on the text alone, no token on that."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoint_spec import CheckpointSpec
from guesses import Made, Oracle, consult, draft_freely, drafts_of
from make_checkpoint import make_checkpoint
from parity_cases import photograph, random_ids, user
from together import together

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.drafts.base import MtpDrafter
from vlm_serve.engine.features.drafts.drafting import Drafting, PayoffProbe
from vlm_serve.engine.start.build import build
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams

SPECS = {
    "dense": CheckpointSpec(image_max_pixels=128 * 128, mtp=True),
    "moe": CheckpointSpec(image_max_pixels=128 * 128, num_experts=4, mtp=True),
}
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 256,
    "speculative": "mtp",
    "speculative_tokens": 3,
    "prefix_cache_decode_state_interval": 16,
}
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


class Against(PayoffProbe):
    """It has been found not to pay, once and for all."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def learn(self, seconds: float, tokens: float) -> None:
        pass


@pytest.fixture(scope="module", params=SPECS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mtp"), SPECS[request.param])


@contextmanager
def poisoned(path: Path, **changes: Any) -> Iterator[Pipeline]:
    """Freed blocks and rows hold NaN: what reads them drafts token 0."""
    config = EngineConfig(**(COMMON | {"cache_memory": "64MiB"} | changes))
    with Pipeline.from_engine(Engine(build(str(path), config, poison=True))) as pipe:
        draft_freely(pipe.engine)
        yield pipe


def same_where_both_drafted(ours: Made, theirs: Made) -> int:
    """Drafts in a row may be more or fewer; returns how many have been compared."""
    compared = 0
    for tokens in ours.keys() & theirs.keys():
        pairs = list(zip(ours[tokens], theirs[tokens], strict=False))
        assert all(one == other for one, other in pairs), len(tokens)
        compared += len(pairs)
    return compared


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache_memory": "448KiB", "max_num_seqs": 4},
        {"cache_memory": "448KiB", "max_num_seqs": 4, "host_cache_memory": "16MiB"},
        {"max_num_batched_tokens": 48, "max_num_seqs": 4},
    ],
)
def test_drafts_are_those_of_a_cold_run(checkpoint: Path, changes: dict[str, Any]) -> None:
    """After hits, preemptions, slices, snapshots while decoding, tiers and drafts that held or did
    not: KV and hidden states of the layer are complete and those of the text."""
    base = random_ids(50, 3)
    prompts = [base[: 30 + 5 * index] + random_ids(20, index) for index in range(5)]
    with poisoned(checkpoint, enable_prefix_caching=False) as pipe:
        cold = drafts_of(pipe.engine)
        expected = [pipe.generate(prompt, GREEDY) for prompt in prompts]
        assert max(map(len, cold.values())) == 3
    with poisoned(checkpoint, **changes) as pipe:
        oracle = Oracle(1, mistakes=0.2, vocabulary=pipe.engine.spec.vocab_size)
        for prompt, output in zip(prompts, expected, strict=True):
            oracle.tell(prompt, [output.token_ids[:15]])
        for turn in range(3):
            warm = drafts_of(pipe.engine)
            if turn == 1:
                consult(pipe.engine, oracle)
            with together(pipe.engine, len(prompts)):
                outputs = pipe.generate_many(prompts, [GREEDY] * len(prompts))
            assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]
            assert same_where_both_drafted(warm, cold) > (20 if turn else 100)
            pipe.engine.check()
        stats = pipe.engine.stats()
        assert stats["drafts"]["accepted_tokens"]
        assert any(each.usage.cached_tokens for each in outputs)
        assert (stats["num_preemptions"] > 0) == ("448KiB" in changes.values())


@pytest.mark.usefixtures("compiler")
def test_pictures_and_forks(checkpoint: Path) -> None:
    """Placeholder tokens are read as the pictures they stand for; choices share a prompt."""
    asked = [user(photograph("coffee.png"), "Which one is it?")]
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, n=2, ignore_eos=True)
    answers, made = [], []
    for changes in ({"enable_prefix_caching": False}, {}):
        with poisoned(checkpoint, **changes) as pipe:
            made.append(drafts_of(pipe.engine))
            answers.append([choice.token_ids for choice in pipe.chat(asked, params).choices])
            if not changes:
                again = pipe.chat(asked, params)
                assert again.usage.cached_tokens
                answers.append([choice.token_ids for choice in again.choices])
    assert answers[0] == answers[1] == answers[2]
    assert same_where_both_drafted(*made) > 30


def test_torch_drafts_too(checkpoint: Path) -> None:
    """Without compiled kernels the layer reads copies of its KV; products there depend on the
    number of rows, so that near ties may fall otherwise."""
    prompt = random_ids(40, 1)
    made = []
    for compiled in (False, True):
        with poisoned(checkpoint, compiled_kernels=compiled) as pipe:
            made.append(drafts_of(pipe.engine))
            pipe.generate(prompt, GREEDY)
    both = made[0].keys() & made[1].keys()
    same = sum(made[0][tokens][0] == made[1][tokens][0] for tokens in both)
    assert len(both) > 20 and same >= len(both) - 2


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
def test_a_layer_that_does_not_pay_is_left_out(checkpoint: Path, kv: str) -> None:
    """It reads nothing then, and no token changes; whoever needs it later finds zeros behind the
    prompt instead of what others have left there."""
    prompt = random_ids(40, 1)
    with poisoned(checkpoint, kv_cache_dtype=kv) as pipe:
        drafting, made = pipe.engine._features.get(Drafting), drafts_of(pipe.engine)
        expected = pipe.generate(prompt, GREEDY).token_ids
        assert made and drafting is not None
        pipe.engine.flush()
        drafting.payoff_probe = Against()
        made.clear()
        first = pipe.generate(prompt, GREEDY)
        assert first.token_ids == expected and len(made) <= 1
        drafting.payoff_probe = None
        longer = [*prompt, *first.token_ids]
        again = pipe.generate(longer, GREEDY)
        assert again.usage.cached_tokens > len(prompt)
        assert any(any(drafts) for drafts in made.values()), "drafts of token 0 come from NaN"
        pipe.engine.check()


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_quantised_keys_are_read_as_they_are_stored(checkpoint: Path, kv: str) -> None:
    """What is drafted is that of a cold run there, too."""
    prompt, made = random_ids(40, 1), []
    for enabled in (False, True):
        with poisoned(checkpoint, kv_cache_dtype=kv, enable_prefix_caching=enabled) as pipe:
            made.append(drafts_of(pipe.engine))
            first = pipe.generate(prompt, GREEDY)
            if enabled:
                assert pipe.generate(prompt, GREEDY).token_ids == first.token_ids
    assert len(made[0].keys() & made[1].keys()) > 20
    assert same_where_both_drafted(*made) > 50


def test_a_failed_step_costs_no_token(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_ids(30 + 11 * index, seed=index) for index in range(3)]
    with poisoned(checkpoint) as pipe:
        expected = [each.token_ids for each in pipe.generate_many(prompts, [GREEDY] * 3)]
        pipe.engine.flush()
        executor, turns = pipe.engine._loop._executor, itertools.count()
        run = executor.run

        def failing(plan: Any) -> Any:
            output = run(plan)
            if next(turns) % 5 == 4:
                raise RuntimeError("behind")
            return output

        monkeypatch.setattr(executor, "run", failing)
        outputs = pipe.generate_many(prompts, [GREEDY] * 3)
        assert [each.token_ids for each in outputs] == expected
        pipe.engine.check()


def test_suffixes_come_before(checkpoint: Path) -> None:
    """Where the text is known to go on, the layer drafts nothing."""
    prompt = random_ids(40, 1)
    with poisoned(checkpoint, speculative="mtp,suffix") as pipe:
        first = pipe.generate(prompt, GREEDY)
        made = drafts_of(pipe.engine)
        again = pipe.generate(prompt, GREEDY)
        assert again.token_ids == first.token_ids
        assert again.usage.accepted_prediction_tokens > 15 and len(made) < 15
        kinds = [type(each) for each in pipe.engine._features.get(Drafting).drafters]  # type: ignore[union-attr]
        assert MtpDrafter in kinds and len(kinds) == 2


@pytest.mark.usefixtures("compiler")
def test_a_model_without_state_layers_drafts(tmp_path: Path) -> None:
    """Its state rows hold hidden states and nothing else."""
    spec = CheckpointSpec(vision_depth=0, full_attention_interval=1, mtp=True)
    path, prompt = make_checkpoint(tmp_path, spec), random_ids(50, 3)
    plain = COMMON | {"speculative": "off", "cache_memory": "64MiB"}
    with Pipeline(path, EngineConfig(**plain)) as pipe:
        expected = pipe.generate(prompt, GREEDY).token_ids
    with poisoned(path) as pipe:
        made = drafts_of(pipe.engine)
        for _ in range(2):
            assert pipe.generate(prompt, GREEDY).token_ids == expected
        assert len(made) > 10
        pipe.engine.check()


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, CheckpointSpec(vision_depth=0))
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers") as caught:
        Engine.from_checkpoint(str(path), EngineConfig(speculative="mtp"))
    assert caught.value.param == "speculative"
