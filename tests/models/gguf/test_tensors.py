"""A GGUF file has the tensors, the config and the tokenizer of the checkpoint that it was made
from."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gguf_writer
import numpy as np
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import FAMILIES
from gguf import GGMLQuantizationType as Kind
from gguf_blocks import decode
from gguf_writer import (
    ARCHITECTURES,
    WIDE,
    blocks,
    copy,
    read,
    split,
    text_tensors,
    with_published_windows,
    write_model,
    write_tower,
    write_whole,
)
from make_checkpoint import make_checkpoint
from safetensors.torch import save_file

from vlm_serve.errors import CheckpointError
from vlm_serve.models import read_spec, resolve_checkpoint
from vlm_serve.models.gguf.folder import gguf_files, open_tensors
from vlm_serve.models.gguf.tensors import GgufTensors
from vlm_serve.preprocess.media.media_processors import find_processors
from vlm_serve.preprocess.text.family import QWEN2_5_VL
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
    checkpoint = with_published_windows(make_checkpoint(tmp_path / "model", spec))
    config, wanted = read(checkpoint)
    folder = unfolded(checkpoint)
    found = opened(folder)
    names, checked = set(found.names()), 0
    for own, tensor in wanted.items():
        name = own
        if config["model_type"] in ("qwen2_vl", "qwen2_5_vl"):  # As transformers saves them.
            name = re.sub(r"^model\.", "model.language_model.", own)
            name = re.sub(r"^visual\.", "model.visual.", name)
        if name not in names:
            assert "experts" in name or "in_proj_" in name
            continue
        loaded = found.tensor(name)
        assert found.shape(name) == tuple(loaded.shape) == tuple(tensor.shape), name
        assert torch.allclose(loaded.float(), tensor.float(), rtol=1e-6, atol=1e-7), name
        checked += 1
    assert checked > len(wanted) // 2
    theirs, ours = read_spec(checkpoint), read_spec(folder)
    assert ours.layers[0].mixers[0].pools() == theirs.layers[0].mixers[0].pools()
    for field in ("norm", "rope", "vision", "tied_embeddings", "max_position_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert [each.feed_forwards[0] for each in ours.layers] == [
        each.feed_forwards[0] for each in theirs.layers
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


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_older_towers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older converters called the first products of feed-forwards their last ones."""
    checkpoint = make_checkpoint(tmp_path / "model", next(iter(FAMILIES[family].values())))
    model = write_model(checkpoint, tmp_path / "model.gguf")
    tower = write_tower(checkpoint, tmp_path / "tower.gguf")
    for name in ("mlp.fc1", "mlp.up_proj", "mlp.fc2", "mlp.down_proj"):
        other = "ffn_down" if name in ("mlp.fc1", "mlp.up_proj") else "ffn_up"
        monkeypatch.setitem(gguf_writer._VISION, name, other)
    older = write_tower(checkpoint, tmp_path / "older.gguf")
    assert older.read_bytes() != tower.read_bytes()
    folders = [resolve_checkpoint(model, tower=str(each)) for each in (tower, older)]
    configs, found = (
        [read_spec(each).vision for each in folders],
        [opened(each) for each in folders],
    )
    assert configs[0] == configs[1] and set(found[0].names()) == set(found[1].names())
    for name in found[0].names():
        assert torch.equal(found[0].tensor(name), found[1].tensor(name)), name


def test_a_tower_whose_thirds_are_in_blocks(tmp_path: Path) -> None:
    """Queries, keys and values are one weight here, and become numbers."""
    checkpoint = make_checkpoint(tmp_path / "model", FAMILIES["qwen2_5_vl"]["vl of qwen2.5"])
    model = write_model(checkpoint, tmp_path / "model.gguf")
    tower = write_tower(checkpoint, tmp_path / "tower.gguf", blocks(Kind.Q8_0))
    found = opened(resolve_checkpoint(model, tower=str(tower)))
    wanted = {
        each.name: decode(each.data, each.tensor_type) for each in gguf.GGUFReader(tower).tensors
    }
    name = "model.visual.blocks.1.attn.qkv.weight"
    thirds = [torch.from_numpy(wanted[f"v.blk.1.attn_{part}.weight"]) for part in "qkv"]
    assert (
        torch.equal(found.tensor(name), torch.cat(thirds)) and f"{name}_Q8_0" not in found.names()
    )
    assert "model.visual.blocks.1.attn.proj.weight_Q8_0" in found.names()


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


def test_means_of_pictures(tmp_path: Path) -> None:
    """Means are the checkpoint's in float32, in which pixels are computed."""
    checkpoint = make_checkpoint(tmp_path / "model")
    file = checkpoint / "preprocessor_config.json"
    mean = [0.48145466, 0.4578275, 0.40821073]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": mean}))
    model = write_model(checkpoint, tmp_path / "model.gguf")
    write_tower(checkpoint, tmp_path / "mmproj.gguf")
    found = json.loads((resolve_checkpoint(model) / file.name).read_text())
    assert np.array_equal(np.array(found["image_mean"], np.float32), np.array(mean, np.float32))


def test_media_of_a_tower_without_settings(tmp_path: Path) -> None:
    """Pictures and videos are those of the published Qwen2.5-VL, times of videos too."""
    checkpoint = make_checkpoint(tmp_path / "model", FAMILIES["qwen2_5_vl"]["vl of qwen2.5"])
    write_tower(checkpoint, tmp_path / "mmproj.gguf", bounds=False)
    folder = resolve_checkpoint(write_model(checkpoint, tmp_path / "model.gguf"))
    config = json.loads((folder / "config.json").read_text())
    assert config["vision_config"]["tokens_per_second"] == 2
    published = tmp_path / "published"
    published.mkdir()
    file = json.loads((checkpoint / "preprocessor_config.json").read_text())
    fields = file | {"min_pixels": 3136, "max_pixels": 12845056}
    for name in ("image_mean", "image_std"):  # A file holds them as float32.
        fields[name] = [float(str(np.float32(value))) for value in fields[name]]
    (published / "preprocessor_config.json").write_text(json.dumps(fields))
    ours, theirs = (find_processors(each, config, QWEN2_5_VL) for each in (folder, published))
    for own, their in zip(ours, theirs, strict=True):
        assert own is not None and their is not None and own.config == their.config


def test_sampling_defaults(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_int32("general.sampling.top_k", 20)

    checkpoint = make_checkpoint(tmp_path / "model")
    file = write_model(checkpoint, tmp_path / "sampling.gguf", change=change)
    generation = read_spec(resolve_checkpoint(file, tower="none")).generation
    assert generation["temperature"] == 0.7 and generation["top_k"] == 20
    assert generation["do_sample"] is True


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"])
def test_a_tower_in_the_models_own_file(family: str, tmp_path: Path) -> None:
    """Ollama's converter writes both into one file."""
    spec = next(each for each in FAMILIES[family].values() if each.vision_depth)
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    _, wanted = read(checkpoint)
    file = write_whole(checkpoint, tmp_path / "sha256-0123")
    folder = resolve_checkpoint(file)
    found, visual = opened(folder), [name for name in wanted if ".visual." in name]
    assert visual
    for name in visual:
        assert torch.equal(found.tensor(name).float(), wanted[name].float()), name
    theirs, ours = read_spec(checkpoint), read_spec(folder)
    assert ours.vision == theirs.vision
    name = "preprocessor_config.json"
    own, given = (json.loads((each / name).read_text())["size"] for each in (folder, checkpoint))
    assert own == given
    blind = resolve_checkpoint(file, tower="none")
    assert read_spec(blind).vision is None and blind != folder
    assert not any(".visual." in name for name in opened(blind).names())
    tower = write_tower(checkpoint, tmp_path / "mmproj.gguf")
    named = gguf_files(resolve_checkpoint(file, tower=str(tower)))
    assert named is not None and named.tower == tower
    beside = gguf_files(resolve_checkpoint(file.rename(tmp_path / "own.gguf")))
    assert beside is not None and beside.tower is None


def test_a_tower_in_parts(tmp_path: Path) -> None:
    """A whole model in parts, and a tower beside the parts of another."""
    checkpoint = make_checkpoint(tmp_path / "model", FAMILIES["qwen3_vl"]["vl"])
    parts = split(write_whole(checkpoint, tmp_path / "whole.gguf"), 3)
    folder = resolve_checkpoint(parts[1])
    assert read_spec(folder).vision == read_spec(checkpoint).vision
    found, wanted = opened(folder), read(checkpoint)[1]
    assert found.nbytes == sum(part.stat().st_size for part in parts)
    for name in wanted:
        if ".visual." in name:
            assert torch.equal(found.tensor(name).float(), wanted[name].float()), name
    beside = tmp_path / "beside"
    beside.mkdir()
    plain = write_model(checkpoint, beside / "plain.gguf")
    parts = split(plain, 2)
    plain.unlink()
    write_tower(checkpoint, beside / "mmproj-F16.gguf")
    assert read_spec(resolve_checkpoint(parts[1])).vision is not None
    assert read_spec(resolve_checkpoint(beside)).vision is not None


def test_older_draft_layers_of_ollama_are_left_out(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", CheckpointSpec(vision_depth=0))
    more = [("mtp.fc.weight", np.zeros((8, 8), np.float32))]
    found = opened(resolve_checkpoint(write_model(checkpoint, tmp_path / "m.gguf", more=more)))
    assert not any("mtp" in name for name in found.names())


def test_special_tokens_typed_as_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", CheckpointSpec(vision_depth=0))
    theirs = Tokenizer(checkpoint)
    for name in ("plain", "absent"):

        def change(writer: gguf.GGUFWriter, name: str = name) -> None:
            values = writer.kv_data[0]
            types = values["tokenizer.ggml.token_type"].value
            types[:] = [1 if kind in (3, 4) else kind for kind in types]
            if name == "absent":
                del values["tokenizer.ggml.token_type"]

        file = write_model(checkpoint, tmp_path / f"{name}.gguf", change=change)
        ours = Tokenizer(resolve_checkpoint(file))
        text = "<|im_start|>user\n<think>x</think><tool_call>[PAD7]</tool_call><|im_end|>"
        assert ours.encode(text) == theirs.encode(text)
        assert ours.special_tokens["<|im_end|>"] == theirs.special_tokens["<|im_end|>"]
        assert f"special tokens of {name}.gguf are typed as plain text there" in caplog.text


def test_what_a_file_lacks_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        values = writer.kv_data[0]
        del values["tokenizer.chat_template"]
        values["tokenizer.ggml.pre"].value = "deepseek-r1-qwen"
        writer.add_bos_token_id(3)

    checkpoint = make_checkpoint(tmp_path / "model", CheckpointSpec(vision_depth=0))
    folder = resolve_checkpoint(write_model(checkpoint, tmp_path / "bare.gguf", change=change))
    assert "bare.gguf holds no chat template" in caplog.text and "--chat-template" in caplog.text
    ours = Tokenizer(folder)
    assert ours.special_names["bos_token"] == ours.id_to_token(3)
    assert ours.encode("a word") == Tokenizer(checkpoint).encode("a word")


def test_yarns_attention_factor_is_computed(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)
        writer.add_float32("qwen35.rope.scaling.yarn_attn_factor", 0.87)

    checkpoint = make_checkpoint(tmp_path / "model", CheckpointSpec(vision_depth=0))
    file = write_model(checkpoint, tmp_path / "yarn.gguf", change=change)
    rope = json.loads((resolve_checkpoint(file) / "config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "yarn" and "attention_factor" not in rope


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_factors_beside_weights(family: str, tmp_path: Path) -> None:
    """Converters of NVFP4 write them so: one for a weight, or one for each expert."""
    spec = replace(next(iter(FAMILIES[family].values())), **WIDE)
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    config, tensors = read(checkpoint)
    coded = [
        (name, values)
        for name, values in text_tensors(config, tensors)
        if blocks(Kind.NVFP4)(name, values.shape) == Kind.NVFP4 and "blk." in name
    ]
    factors = {
        name.removesuffix("weight") + "scale": np.linspace(0.5, 2, max(values.shape[:-2] or [1]))
        for name, values in coded
    }
    more = [(name, values.astype(np.float32)) for name, values in factors.items()]
    more += [(name.replace(".scale", ".input_scale"), values[:1]) for name, values in more]
    file = write_model(checkpoint, tmp_path / "nv.gguf", blocks(Kind.NVFP4), more=more)
    found = opened(resolve_checkpoint(file))
    named = {name for name in found.names() if name.endswith("_factor")}
    assert len(named) == sum(len(values) for values in factors.values())
    name = min(name for name in named if "up_proj" in name)
    assert found.tensor(name).tolist() == [0.5]
    wrong = [("blk.0.attn_q.scale", np.ones(3, np.float32))]
    other = write_model(checkpoint, tmp_path / "wrong.gguf", blocks(Kind.NVFP4), more=wrong)
    with pytest.raises(CheckpointError, match=r"attn_q\.scale in wrong\.gguf has the shape \["):
        resolve_checkpoint(other)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
@pytest.mark.parametrize("labels", [None, ["yes", "no"], ["bad", "good"], ["a", "b", "c"]])
def test_a_head_of_labels(labels: list[str] | None, kind: Kind, tmp_path: Path) -> None:
    """Rows yes and no are a reranker's, others a classifier's."""
    places: list[int] = []

    def change(writer: gguf.GGUFWriter) -> None:
        keys = ("tokens", "token_type")
        tokens, types = (writer.kv_data[0][f"tokenizer.ggml.{key}"].value for key in keys)
        places[:] = [place for place, kind in enumerate(types) if kind == 4][:2]
        for place, answer in zip(places, ("yes", "no"), strict=True):
            tokens[place], types[place] = answer, 1
        if labels:
            writer.add_array("qwen3.classifier.output_labels", labels)

    checkpoint = make_checkpoint(tmp_path / "model", CheckpointSpec(family="qwen3", vision_depth=0))
    config, _ = read(checkpoint)
    rows = np.random.default_rng(0).normal(size=(len(labels or "12"), config["hidden_size"]))
    more = [("cls.output.weight", rows.astype(np.float32))]

    def choice(name: str, shape: tuple[int, ...]) -> Kind:
        return kind if name == "cls.output.weight" else Kind.F32

    file = write_model(checkpoint, tmp_path / "m.gguf", choice, change=change, more=more)
    folder = resolve_checkpoint(file)
    found, made = opened(folder), json.loads((folder / "config.json").read_text())
    assert made["tie_word_embeddings"] is False
    if labels in (None, ["yes", "no"]):
        head = found.tensor("lm_head.weight")
        assert torch.allclose(head[places], torch.from_numpy(rows).float(), atol=0.03)
        assert head.shape == (config["vocab_size"], config["hidden_size"])
        assert head.count_nonzero() <= 2 * config["hidden_size"] and "architectures" not in made
        assert "lm_head.weight_Q8_0" not in found.names()
        return
    assert labels is not None and made["id2label"] == dict(zip("012", labels, strict=False))
    assert made["architectures"] == ["Qwen3ForSequenceClassification"]
    assert found.shape("score.weight") == rows.shape
