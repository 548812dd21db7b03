"""Weights change under a running engine: its hits are those of a cold engine on the new ones."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conversation import picture, say
from families import SPECS
from gguf_writer import plain, write_model
from make_checkpoint import make_checkpoint
from PIL import Image
from safetensors.torch import load_file, save_file
from sweeps import quick
from waiting import wait_for
from weight_updates import (
    LONG,
    TEXT,
    ask,
    begin,
    both,
    changing,
    digest_of,
    started,
    tensors_of,
    with_tensors,
)

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.audits import Auditor
from vlm_serve.engine.features.weights import WeightUpdates
from vlm_serve.errors import ConfigError, InvalidRequestError
from vlm_serve.preprocess.identity.keys import WeightsIdentity

KINDS = {
    "text, tied": SPECS["text, tied"],
    "dense": SPECS["dense"],
    "moe": SPECS["text, moe"],
    "next": SPECS["next"],
    "vl": SPECS["vl, tied, one feature, one kv head"],
    "no state": SPECS["attention alone, no state"],
    "mtp": replace(SPECS["text"], mtp=True),
    "quantised at loading": SPECS["text"],
    "codes of four bits at loading": SPECS["text, moe"],
    "fp8": replace(SPECS["text, moe"], quantization="fp8"),
    "gptq": replace(SPECS["text"], quantization="gptq"),
    "awq": replace(SPECS["text"], quantization="awq"),
    "nvfp4": replace(SPECS["text"], quantization="nvfp4-modelopt"),
}
EXTRA: dict[str, dict[str, Any]] = {
    "mtp": {"speculative": "mtp"},
    "quantised at loading": {"quantization": "int8"},
    "codes of four bits at loading": {"quantization": "int4", "quantized_activations": "int8"},
}
"""Options of the engine, by kind."""


class Pair(NamedTuple):
    """Two checkpoints, and the options of the engine that serves them."""

    old: Path
    new: Path
    options: dict[str, Any]


@pytest.fixture(scope="module", params=quick(KINDS, 2))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two checkpoints that differ in all weights, and in nothing else."""
    old, new = both(KINDS[request.param], tmp_path_factory.mktemp("pair"))
    return Pair(old, new, EXTRA.get(request.param, {}))


@pytest.mark.always
def test_hits_are_those_of_a_cold_engine_and_going_back_hits(pair: Pair) -> None:
    engine = changing(pair.old, **pair.options)
    first = ask(engine)
    identity = engine.update_weights(pair.new, version="two")
    assert engine.weight_version == "two" and engine.preprocessor.weights == identity
    miss, hit = ask(engine), ask(engine)
    cold = started(pair.new, **pair.options)
    expected = ask(cold)
    assert cold.preprocessor.weights == identity
    assert cold.preprocessor.root_key() == engine.preprocessor.root_key()
    assert miss.report.boundary == 0 < hit.report.boundary
    assert miss.bits == hit.bits == expected.bits != first.bits
    assert miss.report.weights == hit.report.weights == identity.whole.hex()
    assert expected.report.weights == "" and not hit.report.weight_changes
    engine.update_weights(str(pair.old))
    back = ask(engine)
    assert back.report.boundary > 0 and back.bits == first.bits
    assert engine.check()
    for each in (engine, cold):
        each.close()


def test_single_tensors_change_what_is_made_of_them(text: list[Path], tmp_path: Path) -> None:
    """Joined projections, tied embeddings; a later update keeps an earlier one."""
    engine, path = changing(text[0]), text[0]
    ask(engine)
    for number, end in enumerate(("1.linear_attn.in_proj_a.weight", "embed_tokens.weight")):
        part = tensors_of(text[1], end)
        path = with_tensors(path, tmp_path / str(number), part)
        identity = engine.update_weights(iter(part.items()))
        cold = started(path)
        assert cold.preprocessor.weights == identity
        assert ask(engine).bits == ask(engine).bits == ask(cold).bits
        cold.close()
    engine.close()


@pytest.mark.parametrize("kind", ["fp8", "gptq"])
def test_tensors_of_codes_change_one_by_one(tmp_path: Path, kind: str) -> None:
    """Codes without their scales are what such a file would hold."""
    path, new = both(replace(SPECS["text"], quantization=kind), tmp_path)
    engine = changing(path)
    first = ask(engine)
    for number, ends in enumerate((("scale_inv", "scales"), ("v_proj.weight", "v_proj.qweight"))):
        part = tensors_of(new, *ends)
        path = with_tensors(path, tmp_path / str(number), part)
        identity = engine.update_weights(part.items())
        cold = started(path)
        assert cold.preprocessor.weights == identity
        assert ask(engine).bits == ask(cold).bits != first.bits
        cold.close()
    engine.close()


FAULTS = {
    "shape": lambda name, tensor: tensor[:-1],
    "numbers": lambda name, tensor: tensor * float("nan"),
    "type": lambda name, tensor: tensor.to(torch.int32),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_update_changes_nothing(
    engine: Engine, text: list[Path], tmp_path: Path, fault: str
) -> None:
    first, identity = ask(engine), engine.preprocessor.weights
    part = tensors_of(text[1], "embed_tokens.weight")
    broken = {name: FAULTS[fault](name, tensor).contiguous() for name, tensor in part.items()}
    with pytest.raises(InvalidRequestError, match="embed_tokens"):
        engine.update_weights(broken.items())
    path = with_tensors(text[1], tmp_path / "broken", broken)
    with pytest.raises(InvalidRequestError, match="embed_tokens"):
        engine.update_weights(path)
    again = ask(engine)
    assert again.bits == first.bits and again.report.boundary > 0
    assert engine.preprocessor.weights == identity
    assert engine.update_weights(text[0]) == identity


def test_folders_of_past_updates_are_not_needed(
    engine: Engine, text: list[Path], tmp_path: Path
) -> None:
    """Neither of one without a config, nor of one that is gone."""
    identity = digest_of(engine)
    bare, gone = (Path(shutil.copytree(text[1], tmp_path / name)) for name in ("bare", "gone"))
    (bare / "config.json").unlink()
    for path in (bare, gone):
        engine.update_weights(path)
        shutil.rmtree(path)
        assert engine.update_weights(text[0]).whole.hex() == identity


def test_what_is_refused_by_name(engine: Engine, text: list[Path], tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", replace(SPECS["text, tied"], num_layers=8))
    with pytest.raises(InvalidRequestError, match=r"config\.json differs in .*layer"):
        engine.update_weights(other)
    with pytest.raises(InvalidRequestError, match="has no nonsense that could be replaced"):
        engine.update_weights([("nonsense", torch.zeros(1))])
    with pytest.raises(InvalidRequestError, match=f"has no {'n' * 200} that could be replaced"):
        engine.update_weights([("n" * 100_000, torch.zeros(1))])
    with pytest.raises(InvalidRequestError, match="needs tensors"):
        engine.update_weights([])
    with pytest.raises(InvalidRequestError, match="no safetensors"):
        engine.update_weights(tmp_path)
    outside = tmp_path / "allowed"
    outside.mkdir()
    for file in text[1].iterdir():
        (outside / file.name).symlink_to(file)
    with pytest.raises(InvalidRequestError, match="leads out of the allowed folder"):
        engine.update_weights(outside, below=outside)
    fixed = started(text[0])
    with pytest.raises(InvalidRequestError, match="start with allow_weight_updates"):
        fixed.update_weights(text[1])
    fixed.close()


def test_a_folder_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    """A stored head decides where config.json says nothing; the digests would be equal then."""
    paths = both(replace(SPECS["internvl"], tied_embeddings=True), tmp_path)
    for path in paths:
        config = json.loads((path / "config.json").read_text())
        del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
        (path / "config.json").write_text(json.dumps(config))
    file = paths[1] / "model.safetensors"
    tensors = load_file(file)
    table = next(tensor for name, tensor in tensors.items() if "embed_tokens" in name)
    save_file(tensors | {"lm_head.weight": -table}, file)
    engine = changing(paths[0])
    first = ask(engine)
    with pytest.raises(InvalidRequestError, match="output projection of its own"):
        engine.update_weights(paths[1])
    assert ask(engine).bits == first.bits
    engine.close()


def test_prompts_from_before_an_update_get_its_keys(engine: Engine, text: list[Path]) -> None:
    prompt = engine.preprocessor.prepare([say(TEXT)])
    old = ask(engine, prompt=prompt)
    engine.update_weights(text[1])
    miss = ask(engine, prompt=prompt)
    hit = ask(engine)
    assert miss.report.boundary == 0 < hit.report.boundary
    assert miss.bits == hit.bits != old.bits
    assert miss.report.weights == hit.report.weights != old.report.weights


def test_answers_that_span_an_update_say_where(engine: Engine, text: list[Path]) -> None:
    colds = {path: started(path) for path in text}
    digests = {path: digest_of(cold) for path, cold in colds.items()}
    before = begin(engine, tokens=LONG)
    wait_for(lambda: len(before.tokens) > 5)
    waiting = [begin(engine, f"{number} {TEXT}", tokens=20) for number in range(3)]
    engine.update_weights(text[1])
    for answer in (before, *waiting):
        assert answer.done.wait(120)
    (change,) = before.report.weight_changes
    assert (before.report.weights, change.weights) == (digests[text[0]], digests[text[1]])
    assert 5 < change.token < LONG and change.choice == 0
    assert before.bits[: change.token] == ask(colds[text[0]], tokens=LONG).bits[: change.token]
    forced = (before.tokens[: change.token],)
    onward = ask(colds[text[1]], tokens=LONG, forced=forced)
    assert before.bits[change.token :] == onward.bits[change.token :]
    later = ask(engine, tokens=LONG)
    assert later.bits == ask(colds[text[1]], tokens=LONG).bits
    assert engine.check()
    for cold in colds.values():
        cold.close()


def test_a_choice_that_has_ended_is_of_no_later_weights(engine: Engine, text: list[Path]) -> None:
    plain = ask(engine, tokens=LONG)
    last = next(token for token in range(100) if token not in plain.tokens)
    forced = ((last,), plain.tokens[:2])
    answer = begin(engine, tokens=LONG, n=2, stop_token_ids=[last], forced=forced)
    wait_for(lambda: len(answer.tokens) > 5)
    engine.update_weights(text[1])
    assert answer.done.wait(120)
    wait_for(lambda: {0, 1} == {each.index for each in answer.deltas if each.finish_reason})
    assert [change.choice for change in answer.report.weight_changes] == [1]


def test_updates_at_random_moments(text: list[Path]) -> None:
    """No token of any answer differs from cold engines on the weights that its report names."""
    engine = changing(text[0], cache_memory="2MiB", max_num_seqs=4, cache_audit=1.0)
    colds = {}
    for path in text:
        cold = started(path)
        colds[digest_of(cold)] = cold
    ended = threading.Event()
    moved: list[WeightsIdentity] = []

    def update() -> None:
        while not ended.wait(0.05):
            moved.append(engine.update_weights(text[(1 + len(moved)) % 2]))

    thread = threading.Thread(target=update)
    thread.start()
    answers = []
    for number in range(24):
        content = f"{TEXT}{number % 5}"
        answers.append((content, begin(engine, content, tokens=4 + number, prompt_logprobs=0)))
        if number % 3 == 0:
            answers[-1][1].done.wait(120)
    assert all(answer.done.wait(120) for _, answer in answers)
    ended.set()
    thread.join()
    assert engine.check() and len(moved) > 1
    for content, answer in answers:
        digest, start, tokens = answer.report.weights, 0, len(answer.tokens)
        ends = [*answer.report.weight_changes, None]
        for change in ends:
            end = tokens if change is None else change.token
            forced = (answer.tokens[:start],)
            fields = {"prompt_logprobs": 0} if not start else {}
            expected = ask(colds[digest], content, tokens, forced=forced, **fields)
            assert answer.bits[start:end] == expected.bits[start:end]
            if not start and end:
                rows = [each.deltas[0].prompt_logprobs for each in (answer, expected)]
                assert rows[0] is not None and rows[0] == rows[1]
            digest, start = digest if change is None else change.weights, end
    auditor = engine._auditor
    assert isinstance(auditor, Auditor) and not auditor.counts.mismatches
    for each in (engine, *colds.values()):
        each.close()


def test_updates_name_the_weights_in_their_order(
    engine: Engine, text: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that begins before the last one has told its digest is refused."""
    renew, refused = engine.preprocessor.renew, []

    def slowly(weights: WeightsIdentity) -> None:
        monkeypatch.setattr(engine.preprocessor, "renew", renew)
        try:
            engine.update_weights(text[0])
        except InvalidRequestError as error:
            refused.append(error.message)
        renew(weights)

    monkeypatch.setattr(engine.preprocessor, "renew", slowly)
    engine.update_weights(text[1])
    assert ask(engine).report.weights == digest_of(engine)
    assert refused == ["another update of the weights is under way"]


def test_requests_in_flight_may_be_ended(engine: Engine, text: list[Path]) -> None:
    answer = begin(engine, tokens=500)
    wait_for(lambda: len(answer.tokens) > 2)
    engine.update_weights(text[1], abort=True, flush=True)
    assert answer.done.wait(10) and answer.deltas[-1].finish_reason == "abort"
    assert ask(engine).report.boundary == 0
    engine.update_weights(text[0])
    assert ask(engine).report.boundary == 0, "the cache was emptied"


def test_embeddings_survive_where_the_tower_does_not_change(tmp_path: Path) -> None:
    old, new = both(KINDS["vl"], tmp_path)
    engine = changing(old)
    message = say(picture(Image.effect_noise((96, 64), 80).convert("RGB")), "What is it?")

    def encoded() -> int:
        ask(engine, prompt=engine.preprocessor.prepare([message]))
        return int(engine.stats()["num_encoded_spans"])

    assert encoded() == 1
    engine.update_weights(tensors_of(new, "layers.0.input_layernorm.weight").items())
    assert encoded() == 1
    engine.update_weights(tensors_of(new, "patch_embed.proj.weight").items())
    assert encoded() == 2
    engine.close()


@pytest.mark.parametrize("kind", ["dense", "vl of qwen2.5", "minicpm", "lfm2 vl", "internvl"])
def test_old_weights_are_freed_with_their_last_use(tmp_path: Path, kind: str) -> None:
    """A server exempts what exists at its start from garbage collection, so a cycle would keep the
    weights of the start for ever, and later ones for long."""
    old, new = both(SPECS[kind], tmp_path)
    engine = changing(old)
    image = picture(Image.effect_noise((96, 64), 80).convert("RGB"))

    def served() -> list[weakref.ref[Any]]:
        ask(engine, prompt=engine.preprocessor.prepare([say("What is it?", image)]))
        updates = engine._features.get(WeightUpdates)
        assert updates is not None
        model = updates._reader.model
        return [weakref.ref(each) for each in (model._decoder, model._vision)]

    gc.collect()
    gc.disable()
    try:
        for path in (new, old):
            before = served()
            engine.update_weights(path)
            served()
            assert [each() for each in before] == [None, None]
        before = served()
        engine.sleep(["weights"])
        assert [each() for each in before] == [None, None]
    finally:
        gc.enable()
        engine.close()


def test_pins_end_with_the_weights(engine: Engine, text: list[Path]) -> None:
    ask(engine)
    prompt = engine.preprocessor.prepare([say(TEXT)])
    assert engine.pins.add(prompt, 60) and engine.pins.listed()
    engine.update_weights(text[1])
    assert not engine.pins.listed()


def test_a_gguf_file_is_refused(engine: Engine, text: list[Path], tmp_path: Path) -> None:
    """Its tensors have no digests of their own."""
    (tmp_path / "model").mkdir()
    file = write_model(text[0], tmp_path / "model" / "model.gguf", plain)
    with pytest.raises(ConfigError, match="not possible with GGUF files"):
        changing(file)
    with pytest.raises(InvalidRequestError, match="no safetensors"):
        engine.update_weights(file.parent)
