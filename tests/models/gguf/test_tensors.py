"""A GGUF file has the tensors, the config and the tokenizer of the checkpoint that it was made
from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import FAMILIES
from gguf import GGMLQuantizationType as Kind
from gguf_blocks import decode
from gguf_writer import ARCHITECTURES, blocks, copy, read, write_model, write_tower
from make_checkpoint import make_checkpoint
from safetensors.torch import save_file

from vlm_serve.errors import CheckpointError
from vlm_serve.models import read_spec, resolve_checkpoint
from vlm_serve.models.gguf.folder import gguf_files, open_tensors
from vlm_serve.models.gguf.tensors import GgufTensors
from vlm_serve.preprocess.text.tokenizer import Tokenizer

_CASES = [
    pytest.param(spec, id=name)
    for family, shapes in FAMILIES.items()
    if family in ARCHITECTURES
    for name, spec in shapes.items()
    if not spec.dense_layers  # which llama.cpp has none of
]
_CASES += [
    pytest.param(replace(next(iter(FAMILIES[family].values())), mtp=True), id=f"{family}, drafts")
    for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next")
]


def opened(folder: Path) -> GgufTensors:
    files = gguf_files(folder)
    assert files is not None
    return open_tensors(files)


def unfolded(checkpoint: Path) -> Path:
    """The folder of a checkpoint's GGUF files, written beside it."""
    config, _ = read(checkpoint)
    model = write_model(checkpoint, checkpoint.parent / "model.gguf")
    if "vision_config" in config:
        write_tower(checkpoint, checkpoint.parent / "mmproj.gguf")
    return resolve_checkpoint(model)


@pytest.mark.parametrize("spec", _CASES)
def test_every_tensor(spec: Any, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    config, wanted = read(checkpoint)
    folder = unfolded(checkpoint)
    found = opened(folder)
    names, checked = set(found.names()), 0
    for name, tensor in wanted.items():
        if name not in names:
            assert "experts" in name or "in_proj_" in name
            continue
        own = found.tensor(name)
        assert found.shape(name) == tuple(own.shape) == tuple(tensor.shape), name
        assert torch.allclose(own.float(), tensor.float(), rtol=1e-6, atol=1e-7), name
        checked += 1
    assert checked > len(wanted) // 2
    theirs, ours = read_spec(checkpoint), read_spec(folder)
    assert ours.layers[0].mixer.pools() == theirs.layers[0].mixer.pools()
    for field in ("norm", "rope", "vision", "tied_embeddings", "max_position_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert [each.feed_forward for each in ours.layers] == [
        each.feed_forward for each in theirs.layers
    ]


def test_a_draft_layer_alone_is_named(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", CheckpointSpec(vision_depth=0, mtp=True))
    config, tensors = read(checkpoint)
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith("mtp.") or "layers." not in name
    }
    assert len(kept) < len(tensors)
    save_file(kept, checkpoint / "model.safetensors")
    file = write_model(checkpoint, tmp_path / "mtp-model.gguf")
    with pytest.raises(CheckpointError, match=r"mtp-model\.gguf holds the draft layer alone"):
        resolve_checkpoint(file)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_experts_apart_and_fused(family: str, tmp_path: Path) -> None:
    spec = next(iter(FAMILIES[family].values()))
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    _, wanted = read(checkpoint)
    apart = opened(unfolded(checkpoint))
    both = wanted["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    if family == "qwen3_vl_moe":
        both = both.transpose(1, 2)
    half = both.shape[1] // 2
    name = "model.language_model.layers.0.mlp.experts.{}.{}_proj.weight"
    for expert in range(len(both)):
        assert torch.equal(apart.tensor(name.format(expert, "gate")), both[expert, :half])
        assert torch.equal(apart.tensor(name.format(expert, "up")), both[expert, half:])


def test_the_tokenizer(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    theirs, ours = Tokenizer(checkpoint), Tokenizer(unfolded(checkpoint))
    texts = (
        "Where is the green house?  \n\n\tOver there: 12 345 metres — straight on!",
        '<think>a</think> <|im_start|>user <|fim_prefix|> <tool_call> {"a": [1, 2]}',
        "e\u0301 \u1100\u1161 naïve ☕ 漢字",
    )
    for text in texts:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode_plain(text) == theirs.encode_plain(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.special_tokens == theirs.special_tokens
    assert ours.eos_ids == theirs.eos_ids
    assert ours.special_names.get("eos_token") == "<|im_end|>"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K", "MXFP4", "Q4_K", "Q5_K"])
def test_weights_in_blocks_are_those_of_numbers(kind: str, tmp_path: Path) -> None:
    """Rows and columns of value heads move with their scales."""
    spec = CheckpointSpec(
        hidden_size=256, gdn_value_heads=4, gdn_value_dim=64, gdn_key_dim=64, vision_depth=0
    )
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    coded = write_model(checkpoint, tmp_path / "coded.gguf", blocks(Kind[kind]))

    def as_numbers(tensor: Any) -> tuple[Any, Kind]:
        values = decode(tensor.data, tensor.tensor_type)
        return values.reshape(tuple(map(int, tensor.shape[::-1]))), Kind.F32

    plain = copy(coded, tmp_path / "plain.gguf", as_numbers)
    ours, theirs = (opened(resolve_checkpoint(each)) for each in (coded, plain))
    config = json.loads((resolve_checkpoint(coded) / "config.json").read_text())
    assert any("out_proj" in each for each in config["quantization_config"]["types"][kind])
    for name in theirs.names():
        assert torch.equal(ours.tensor(name), theirs.tensor(name)), name


@pytest.mark.parametrize("bounds", [True, False])
def test_bounds_of_pictures(bounds: bool, tmp_path: Path) -> None:
    """Those of the file, or of the published processors."""
    checkpoint = make_checkpoint(tmp_path / "model")
    model = write_model(checkpoint, tmp_path / "model.gguf")
    write_tower(checkpoint, tmp_path / "mmproj.gguf", bounds=bounds)
    name = "preprocessor_config.json"
    own, found = (
        json.loads((folder / name).read_text())["size"]
        for folder in (checkpoint, resolve_checkpoint(model))
    )
    published = {"shortest_edge": 65536, "longest_edge": 16777216}
    assert own != published and found == (own if bounds else published)


def test_sampling_defaults(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_int32("general.sampling.top_k", 20)

    checkpoint = make_checkpoint(tmp_path / "model")
    file = write_model(checkpoint, tmp_path / "sampling.gguf", change=change)
    generation = read_spec(resolve_checkpoint(file, tower="none")).generation
    assert generation["temperature"] == 0.7 and generation["top_k"] == 20
    assert generation["do_sample"] is True
