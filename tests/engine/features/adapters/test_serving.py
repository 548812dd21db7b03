"""Engines with adapters: answers have the bits that they have alone, and share no entry."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import oracle
import pytest
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from parity import greedy, inputs_of
from parity_cases import photograph, random_ids, user
from peft_folders import adapted, random_adapter

from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.engine.features.adapters.store import MAX_ADAPTERS, OTHERS
from vlm_serve.engine.features.usage import MAX_NAMES, UsageByName
from vlm_serve.engine.requests.outputs import Usage
from vlm_serve.errors import CheckpointError, ConfigError, InvalidRequestError, ModelNotFoundError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.preprocess.identity.keys import NO_ADAPTER, AdapterIdentity
from vlm_serve.sampling_params import SamplingParams

BASE = EngineConfig(device="cpu", dtype="float32", block_size=16, cache_memory="32MiB")
WITH_LOGPROBS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and adapters of it: three of the text, one of the tower as well."""
    root = tmp_path_factory.mktemp("adapters")
    path = make_checkpoint(root / "model", SPECS["dense"])
    for seed in range(3):
        random_adapter(path, root / f"text{seed}", seed, only=["language_model.layers", "lm_head"])
    random_adapter(path, root / "sight", 9)
    return root


def config(place: Path, *names: str, **options: object) -> EngineConfig:
    modules = tuple(f"{name}={place / name}" for name in names)
    return dataclasses.replace(BASE, lora_modules=modules, **options)  # type: ignore[arg-type]


def identity(pipe: Pipeline, name: str) -> AdapterIdentity:
    served = pipe.engine.adapters.find(name) if name else None
    return NO_ADAPTER if served is None else served.identity


def generate(pipe: Pipeline, name: str, ids: Sequence[int]) -> Output:
    return pipe.generate(ids, WITH_LOGPROBS, adapter=identity(pipe, name))


@pytest.mark.parametrize("compiled", [True, False])
def test_answers_are_those_of_the_unmerged_adapter(place: Path, compiled: bool) -> None:
    options = config(place, "text0", "sight", compiled_kernels=compiled)
    ids = random_ids(50, 4)
    with Pipeline(place / "model", options) as pipe:
        got = {name: generate(pipe, name, ids).token_ids for name in ("text0", "sight", "")}
    inputs = {"input_ids": torch.tensor([ids])}
    for name in ("text0", "sight"):
        with adapted(place / "model", place / name, {"": 2.0}):
            assert got[name] == oracle.greedy(place / "model", inputs, 8)
    assert got[""] == oracle.greedy(place / "model", inputs, 8)
    assert len(set(map(tuple, got.values()))) == 3


@pytest.mark.parametrize("speculative", ["auto", "off"])
def test_answers_beside_each_other_have_the_bits_that_they_have_alone(
    place: Path, speculative: str
) -> None:
    names = ["", "text0", "text1", "text2", "text0", "", "sight", "text1"]
    prompts = [random_ids(30 + 7 * each, each) for each in range(len(names))]
    options = config(place, "text0", "text1", "text2", "sight", speculative=speculative)
    with Pipeline(place / "model", options) as pipe:
        alone = []
        for name, ids in zip(names, prompts, strict=True):
            pipe.engine.flush()
            alone.append(generate(pipe, name, ids))
        pipe.engine.flush()
        together = [None] * len(names)

        def ask(index: int) -> None:
            together[index] = generate(pipe, names[index], prompts[index])  # type: ignore[call-overload]

        threads = [threading.Thread(target=ask, args=(each,)) for each in range(len(names))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        hits = [generate(pipe, name, ids) for name, ids in zip(names, prompts, strict=True)]
        pipe.engine.check()
    for own, mixed, hit in zip(alone, together, hits, strict=True):
        assert mixed is not None and mixed.logprobs == own.logprobs
        assert hit.logprobs == own.logprobs and hit.usage.cached_tokens


def test_no_entry_is_shared_between_adapters(place: Path) -> None:
    ids = random_ids(64, 1)
    with Pipeline(place / "model", config(place, "text0", "text1")) as pipe:
        pipe.engine.adapters.load(LoRA("again", place / "text0"))
        first = generate(pipe, "text0", ids)
        others = [generate(pipe, name, ids) for name in ("", "text1")]
        same = generate(pipe, "again", ids)
    assert not first.usage.cached_tokens
    assert not any(each.usage.cached_tokens for each in others)
    assert same.usage.cached_tokens and same.logprobs == first.logprobs


def test_embeddings_are_shared_unless_the_tower_is_changed(place: Path) -> None:
    messages = [user(photograph("cell.png"), "What is this?")]
    with Pipeline(place / "model", config(place, "text0", "sight")) as pipe:

        def ask(name: str) -> Output:
            return pipe.chat(messages, greedy(4), adapter=identity(pipe, name))

        counts = []
        for name in ("", "text0", "sight"):
            ask(name)
            counts.append(pipe.engine.stats()["num_encoded_spans"])
    assert counts[0] == counts[1] and counts[2] == 2 * counts[0]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_changed_tower_sees_as_transformers_does(place: Path, compiled: bool) -> None:
    messages = [user(photograph("cell.png"), "What is this?")]
    options = config(place, "sight", compiled_kernels=compiled)
    with Pipeline(place / "model", options) as pipe:
        got = pipe.chat(messages, greedy(8), adapter=identity(pipe, "sight")).token_ids
    with adapted(place / "model", place / "sight", {"": 2.0}):
        assert got == oracle.greedy(place / "model", inputs_of(place / "model", messages), 8)


def test_more_adapters_than_slots_take_turns(place: Path) -> None:
    names = ["text0", "text1", "text2", "sight", "text0", "text1"] * 2
    prompts = [random_ids(40 + each, each) for each in range(len(names))]
    with Pipeline(place / "model", config(place, *sorted(set(names)), max_loras=1)) as pipe:
        found: dict[int, Output] = {}

        def ask(index: int) -> None:
            found[index] = generate(pipe, names[index], prompts[index])

        threads = [threading.Thread(target=ask, args=(each,)) for each in range(len(names))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        pipe.engine.flush()
        for index, name in enumerate(names):
            assert generate(pipe, name, prompts[index]).logprobs == found[index].logprobs


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


def test_unloading_waits_for_the_last_user(place: Path) -> None:
    params = dataclasses.replace(WITH_LOGPROBS, max_tokens=200)
    with Pipeline(place / "model", config(place, "text0")) as pipe:
        own = identity(pipe, "text0")
        stream = pipe.stream([user("Tell me more.")], params, adapter=own)
        next(stream)
        go_on = threading.Event()
        pipe.engine._loop.post(partial(_wait, go_on))
        leaving = threading.Thread(target=pipe.engine.adapters.unload, args=("text0",))
        leaving.start()
        leaving.join(0.2)
        assert leaving.is_alive() and pipe.engine.adapters.find("text0") is None
        with pytest.raises(ModelNotFoundError, match="has been unloaded"):
            pipe.generate(random_ids(20, 1), greedy(2), adapter=own)
        go_on.set()
        assert sum(1 for _ in stream) == 199
        leaving.join(20)
        assert not leaving.is_alive()
        with pytest.raises(ModelNotFoundError, match="no adapter 'text0'"):
            pipe.engine.adapters.unload("text0")
        pipe.engine.adapters.load(LoRA("text0", place / "text1"))
        assert identity(pipe, "text0") != own


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_modules": ("text0",)}, "form name=path"),
        ({"lora_modules": ("a=x", "a=y")}, "names 'a' twice"),
    ],
)
def test_options_that_cannot_be_are_refused(
    place: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Pipeline(place / "model", dataclasses.replace(BASE, **options))  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_a_start_names_the_adapter_at_fault(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="lora_modules, gone: .*nosuch' is neither a dir"):
        Pipeline(place / "model", dataclasses.replace(BASE, lora_modules=("gone=/nosuch",)))
    with pytest.raises(CheckpointError, match="lora_modules, bare: .* no adapter_config"):
        Pipeline(place / "model", dataclasses.replace(BASE, lora_modules=(f"bare={tmp_path}",)))


def test_names_clash_and_ranks_are_limited(place: Path) -> None:
    with Pipeline(place / "model", config(place, "text0")) as pipe:
        store = pipe.engine.adapters
        with pytest.raises(InvalidRequestError, match="'text0' is taken"):
            store.load(LoRA("text0", place / "text1"))
        with pytest.raises(InvalidRequestError, match="'demo' is a name of the model"):
            store.load(LoRA("demo", place / "text1"), taken=("demo",))
        with pytest.raises(InvalidRequestError, match="1 to 128 letters"):
            LoRA("a b", place / "text1")
    with pytest.raises(Exception, match="more than max_lora_rank 2"):
        Pipeline(place / "model", config(place, "text0", max_lora_rank=2))


def test_requests_are_counted_by_adapter(place: Path) -> None:
    ids = random_ids(40, 1)
    with Pipeline(place / "model", config(place, "text0", "text1")) as pipe:
        for name in ("text0", "text0", "", "text1"):
            generate(pipe, name, ids)
        counts = pipe.engine.stats()["adapters"]
    assert {name: each["requests"] for name, each in counts.items()} == {"text0": 2, "text1": 1}
    assert counts["text0"]["prompt_tokens"] == 80 and counts["text0"]["generated_tokens"] == 16
    assert counts["text0"]["cached_tokens"] > counts["text1"]["cached_tokens"] == 0


def test_names_in_counts_are_bounded() -> None:
    counts = UsageByName(OTHERS)
    for name in [*map(str, range(MAX_NAMES + 5)), "3"]:
        counts.add(name, Usage(7, accepted_prediction_tokens=2, rejected_prediction_tokens=3))
    found = counts.as_dict()
    assert len(found) == MAX_NAMES + 1 and found[OTHERS]["requests"] == 5
    assert found["3"]["prompt_tokens"] == 14
    assert (found["3"]["draft_tokens"], found["3"]["accepted_tokens"]) == (10, 4)


def test_a_thousand_adapters_are_the_most(place: Path) -> None:
    """The next one is refused, and requests of the others go on."""
    with Pipeline(place / "model", config(place, "text0", "text1")) as pipe:
        store, ids = pipe.engine.adapters, random_ids(40, 1)
        before = generate(pipe, "text1", ids)
        for number in range(MAX_ADAPTERS - 2):
            store.load(LoRA(f"again{number}", place / "text0"))
        with pytest.raises(InvalidRequestError, match="1000 adapters are loaded"):
            store.load(LoRA("late", place / "text2"))
        kept = [store.find(name) for name in ("text0", "text1")]
        assert store.num_bytes == sum(each.adapter.nbytes for each in kept if each is not None)
        assert generate(pipe, "text1", ids).logprobs == before.logprobs
        store.unload("again7")
        store.load(LoRA("late", place / "text2"))
        assert generate(pipe, "late", ids).logprobs != before.logprobs


@pytest.mark.parametrize("slots", [1, 3])
def test_the_state_at_an_answer_s_end_is_the_adapter_s_own(place: Path, slots: int) -> None:
    names = ["text0", "text1", "text2", ""]
    asked = config(place, *names[:3], max_loras=slots, prefix_cache_answer_ends="always")
    with Pipeline(place / "model", asked) as pipe:
        end = pipe.engine.preprocessor.tokenizer.special_tokens["<|im_end|>"]
        params = dataclasses.replace(
            WITH_LOGPROBS, max_tokens=30, min_tokens=21, logit_bias={end: 100.0}, ignore_eos=False
        )
        for index, name in enumerate(names):
            prompt = random_ids(40 + index, index)
            first = pipe.generate(prompt, params, adapter=identity(pipe, name))
            assert first.finish_reason == "stop"
            turn = [*prompt, *first.token_ids, *random_ids(9, 99)]
            hit = generate(pipe, name, turn)
            assert hit.usage.cached_tokens == len(prompt) + len(first.token_ids)
            pipe.engine.flush()
            assert generate(pipe, name, turn).logprobs == hit.logprobs
