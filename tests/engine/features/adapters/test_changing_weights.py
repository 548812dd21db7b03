"""Weights change under an engine with adapters: these stay, and serve the new weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SPECS
from peft_folders import (
    fused_experts,
    linears,
    random_adapter,
    random_expert_factors,
    random_factors,
    write_adapter,
)
from waiting import wait_for
from weight_updates import (
    LONG,
    TEXT,
    Answer,
    ask,
    begin,
    both,
    changing,
    digest_of,
    started,
    tensors_of,
)

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.errors import CheckpointError, InvalidRequestError

NAMES = ("", "text0", "text1", "sight")
HEAD = "base_model.model.lm_head.base_layer.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, and adapters of both: two of the text, one of the tower as well."""
    root = tmp_path_factory.mktemp("changing")
    path, _ = both(SPECS["dense"], root)
    for seed in range(2):
        random_adapter(path, root / f"text{seed}", seed, only=["language_model.layers", "lm_head"])
    random_adapter(path, root / "sight", 9)
    return root


def modules(place: Path, *names: str, **options: Any) -> dict[str, Any]:
    return {"lora_modules": tuple(f"{name}={place / name}" for name in names), **options}


@pytest.fixture
def engine(place: Path) -> Iterator[Engine]:
    made = changing(place / "first", **modules(place, *NAMES[1:], max_loras=2))
    yield made
    made.close()


def of_adapter(engine: Engine, name: str, tokens: int = 8, **fields: Any) -> Answer:
    """Begin an answer with an adapter."""
    adapter = engine.adapters.identity_of(name or None)
    prompt = engine.preprocessor.prepare([{"role": "user", "content": TEXT}], adapter=adapter)
    return begin(engine, tokens=tokens, prompt=prompt, **fields)


def asked(engine: Engine, name: str, tokens: int = 8, **fields: Any) -> Answer:
    answer = of_adapter(engine, name, tokens, **fields)
    assert answer.done.wait(120)
    return answer


def test_hits_are_those_of_a_cold_engine_with_the_same_adapters(
    engine: Engine, place: Path
) -> None:
    """More adapters than slots, so that one is laid out behind the update."""
    first = {name: asked(engine, name) for name in NAMES}
    identity = engine.update_weights(place / "second")
    miss = {name: asked(engine, name) for name in NAMES}
    hits = {name: asked(engine, name) for name in NAMES}
    cold = started(place / "second", **modules(place, *NAMES[1:], max_loras=2))
    assert cold.preprocessor.weights == identity
    for name in NAMES:
        assert miss[name].report.boundary == 0 < hits[name].report.boundary
        assert miss[name].bits == hits[name].bits == asked(cold, name).bits != first[name].bits
        assert hits[name].report.weights == identity.whole.hex()
    assert len({str(each.bits) for each in hits.values()}) == len(NAMES)
    engine.update_weights(place / "first")
    for name in NAMES:
        back = asked(engine, name)
        assert back.report.boundary > 0 and back.bits == first[name].bits
    assert engine.check()
    cold.close()


def test_answers_with_an_adapter_that_span_an_update(engine: Engine, place: Path) -> None:
    before = of_adapter(engine, "text1", LONG)
    waiting = [of_adapter(engine, name, 20) for name in NAMES]
    wait_for(lambda: len(before.tokens) > 5)
    engine.update_weights(place / "second")
    assert all(each.done.wait(120) for each in (before, *waiting))
    (change,) = before.report.weight_changes
    colds = [started(place / path, **modules(place, "text1")) for path in ("first", "second")]
    assert [digest_of(cold) for cold in colds] == [before.report.weights, change.weights]
    forced = (before.tokens[: change.token],)
    onward = [asked(colds[0], "text1", LONG), asked(colds[1], "text1", LONG, forced=forced)]
    assert before.bits[: change.token] == onward[0].bits[: change.token]
    assert before.bits[change.token :] == onward[1].bits[change.token :]
    assert engine.check()
    for cold in colds:
        cold.close()


def test_adapters_of_routed_experts_stay(tmp_path: Path) -> None:
    path, new = both(SPECS["qwen3 moe"], tmp_path)
    tensors = random_expert_factors(fused_experts(path), 3, 4)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    write_adapter(tmp_path / "tuned", tensors, 4, target_parameters=names)
    options = modules(tmp_path, "tuned", lora_experts="all")
    engine, cold = changing(path, **options), started(new, **options)
    old = asked(engine, "tuned")
    engine.update_weights(tensors_of(new, "weight", "_proj").items())
    assert asked(engine, "tuned").bits == asked(cold, "tuned").bits != old.bits
    assert ask(engine).bits == ask(cold).bits
    for each in (engine, cold):
        each.close()


def test_a_copy_of_the_models_tensors_has_to_be_that_of_the_new_weights(place: Path) -> None:
    """PEFT saves the output projection beside factors. A cold engine refuses another one."""
    heads = {}
    for path in ("first", "second"):
        (heads[path],) = tensors_of(place / path, "lm_head.weight").values()
        sizes = {name: size for name, size in linears(place / path).items() if "q_proj" in name}
        write_adapter(place / f"with-{path}", random_factors(sizes, 1) | {HEAD: heads[path]})
    engine = changing(place / "first", **modules(place, "with-first"))
    old = asked(engine, "with-first")
    with pytest.raises(InvalidRequestError, match=r"'with-first' has a copy of lm_head\.weight"):
        engine.update_weights(place / "second")
    again = asked(engine, "with-first")
    assert again.bits == old.bits and again.report.boundary > 0
    rest = tensors_of(place / "second", "q_proj.weight", "norm.weight")
    engine.update_weights(rest.items())
    engine.adapters.unload("with-first")
    engine.update_weights([("lm_head.weight", heads["second"])])
    with pytest.raises(CheckpointError, match="differs from the model's tensor"):
        engine.adapters.load(LoRA("old", str(place / "with-first")))
    engine.adapters.load(LoRA("new", str(place / "with-second")))
    with pytest.raises(InvalidRequestError, match=r"'new' has a copy of lm_head\.weight"):
        engine.update_weights([("lm_head.weight", torch.zeros_like(heads["first"]))])
    engine.update_weights(place / "second")
    cold = started(place / "second", **modules(place, "with-second"))
    assert asked(engine, "new").bits == asked(cold, "with-second").bits
    for each in (engine, cold):
        each.close()


def test_an_adapter_read_beside_other_weights_is_not_taken(
    engine: Engine, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (head,) = tensors_of(place / "first", "lm_head.weight").values()
    sizes = {name: size for name, size in linears(place / "first").items() if "q_proj" in name}
    folder = write_adapter(place / "late", random_factors(sizes, 1) | {HEAD: head})
    read = engine.adapters._read

    def meanwhile(path: Any) -> Any:
        found = read(path)
        engine.update_weights(place / "second")
        return found

    monkeypatch.setattr(engine.adapters, "_read", meanwhile)
    with pytest.raises(CheckpointError, match=r"'late' has a copy of lm_head\.weight"):
        engine.adapters.load(LoRA("late", str(folder)))
    assert engine.adapters.find("late") is None
