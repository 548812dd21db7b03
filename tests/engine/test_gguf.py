"""A model in GGUF files answers as the checkpoint that they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_writer
import pytest
from checkpoint_spec import CheckpointSpec
from families import FAMILIES
from gguf import GGMLQuantizationType as Kind
from gguf_blocks import decode
from gguf_writer import WIDE, blocks, copy, with_published_windows, write_model, write_tower
from guesses import Made, draft_freely, drafts_of
from make_checkpoint import make_checkpoint
from parity_cases import photograph, random_ids, user

from vlm_serve import EngineConfig, Pipeline
from vlm_serve.commands.plan import make
from vlm_serve.sampling_params import SamplingParams

_GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
_CONFIG: dict[str, Any] = {"dtype": "float32", "block_size": 16, "cache_memory": "64MiB"}
_TALK = (
    {"role": "user", "content": "What is the red circle in the middle?"},
    {"role": "assistant", "content": "A <tool_call> of 12 pictures ☕"},
    {"role": "user", "content": "Tell me about the house, please."},
)


def answers(model: Path, *, sees: bool, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers to a conversation, to ids and, if the model sees, to a picture."""
    with Pipeline(model, EngineConfig(**(_CONFIG | options))) as pipe:
        found = [pipe.chat(list(_TALK), _GREEDY), pipe.generate(random_ids(150, 5), _GREEDY)]
        if sees:
            found.append(pipe.chat([user(photograph("coffee.png"), "What is this?")], _GREEDY))
    return [(each.prompt_token_ids, each.token_ids) for each in found]


@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("qwen3_5", 0),
        ("qwen3_vl", 0),
        ("qwen2", 0),
        ("qwen2_5_vl", 0),
        pytest.param("qwen2_vl", 1, marks=pytest.mark.sweep),
        pytest.param("qwen3_5_moe", 0, marks=pytest.mark.sweep),
        pytest.param("qwen3_vl_moe", 0, marks=pytest.mark.sweep),
        pytest.param("qwen3_next", 0, marks=pytest.mark.sweep),
        pytest.param("qwen3_5_moe_text", 1, marks=pytest.mark.sweep),
    ],
)
def test_plain_numbers(family: str, place: int, tmp_path: Path) -> None:
    # Experts of another shape than the transposed one's, which would be read as it is.
    spec = replace(list(FAMILIES[family].values())[place], moe_intermediate_size=48)
    checkpoint = with_published_windows(make_checkpoint(tmp_path / "model", spec))
    model = write_model(checkpoint, tmp_path / "model.gguf")
    sees = spec.vision_depth > 0
    if sees:
        write_tower(checkpoint, tmp_path / "mmproj.gguf")
    assert answers(model, sees=sees) == answers(checkpoint, sees=sees)


def test_the_text_of_a_vision_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of Qwen2-VL and Qwen2.5-VL are read without their towers."""
    checkpoint = make_checkpoint(tmp_path / "model", next(iter(FAMILIES["qwen2"].values())))
    monkeypatch.setitem(gguf_writer.ARCHITECTURES, "qwen2", "qwen2vl")
    model = write_model(checkpoint, tmp_path / "model.gguf")
    assert b"qwen2vl" in model.read_bytes()
    assert answers(model, sees=False) == answers(checkpoint, sees=False)


@pytest.mark.parametrize(
    "kind",
    ["Q8_0", "Q4_K", "Q6_K"]
    + [pytest.param(each, marks=pytest.mark.sweep) for each in ("Q4_0", "MXFP4", "Q5_K", "Q5_1")],
)
@pytest.mark.parametrize("experts", [0, pytest.param(4, marks=pytest.mark.sweep)])
def test_blocks(kind: str, experts: int, tmp_path: Path) -> None:
    """A model in blocks answers as one of the numbers that they stand for."""
    spec = CheckpointSpec(
        gdn_key_heads=2, gdn_value_heads=4, num_experts=experts, vision_depth=0, **WIDE
    )
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    coded = write_model(checkpoint, tmp_path / "coded.gguf", blocks(Kind[kind]))

    def as_numbers(tensor: Any) -> tuple[Any, Kind]:
        values = decode(tensor.data, tensor.tensor_type)
        return values.reshape(tuple(map(int, tensor.shape[::-1]))), Kind.F32

    plain = copy(coded, tmp_path / "plain.gguf", as_numbers)
    found = answers(coded, sees=False, quantized_activations="none")
    assert found == answers(plain, sees=False)
    if kind != "Q8_0":
        assert found != answers(checkpoint, sees=False)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.sweep)])
def test_the_draft_layer(family: str, tmp_path: Path) -> None:
    """It drafts what the checkpoint's does."""
    spec = replace(next(iter(FAMILIES[family].values())), vision_depth=0, mtp=True)
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    model = write_model(checkpoint, tmp_path / "model.gguf")
    found: list[tuple[Made, list[int]]] = []
    for path in (checkpoint, model):
        options = _CONFIG | {"speculative": "mtp", "speculative_tokens": 3}
        with Pipeline(path, EngineConfig(**options)) as pipe:
            draft_freely(pipe.engine)
            made = drafts_of(pipe.engine)
            found.append((made, pipe.generate(random_ids(60, 5), _GREEDY).token_ids))
    assert found[0] == found[1]
    assert max(map(len, found[0][0].values())) == 3


def test_the_plan_of_a_file(tmp_path: Path) -> None:
    """It knows the types of all weights."""
    spec = CheckpointSpec(hidden_size=256, vision_depth=0)
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    coded = write_model(checkpoint, tmp_path / "coded.gguf", blocks(Kind.Q8_0, Kind.F16))
    plan = make(str(coded), EngineConfig(cache_memory="64MiB"))
    assert [name for name, _ in plan.weights.formats][:1] == ["Q8_0"]
    with Pipeline(coded, EngineConfig(cache_memory="64MiB")) as pipe:
        loaded = pipe.engine.weights.in_memory
    assert abs(plan.weights.in_memory - loaded) < 0.01 * loaded
