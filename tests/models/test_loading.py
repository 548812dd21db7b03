"""Every layout of a checkpoint loads to the same model; broken ones are named."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import httpx
import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS
from huggingface_hub import errors
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence
from safetensors.torch import load_file, save_file

from vlm_serve.errors import CheckpointError, ModelNotFoundError
from vlm_serve.models import load_model, resolve_checkpoint
from vlm_serve.models.files import weight_files
from vlm_serve.models.registry import read_spec

SPEC = CheckpointSpec(num_layers=4)
MOE = CheckpointSpec(num_layers=4, num_experts=4)
TEXT = CheckpointSpec(num_layers=4, vision_depth=0)
TOKENS = [5, 17, 300, 42, 42, 7, 99, 3]


def logits(path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return Driver(load_model(path, dtype, "cpu")).prefill(text_sequence(TOKENS))


def rewrite(path: Path, rename: dict[str, str]) -> None:
    """Rename the tensors of a single-file checkpoint by prefix; an empty name drops them."""
    file = path / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        for old, new in rename.items():
            if name.startswith(old):
                name = new + name.removeprefix(old) if new else ""
                break
        if name:
            tensors[name] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_are_converted_once(tmp_path: Path, dtype: str) -> None:
    path = make_checkpoint(tmp_path, dataclasses.replace(SPEC, dtype=dtype))
    expected = oracle.logits(path, {"input_ids": torch.tensor([TOKENS])})
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=0)


def test_shards_and_odd_file_names(tmp_path: Path) -> None:
    whole = logits(make_checkpoint(tmp_path / "a", SPEC))
    shards = make_checkpoint(tmp_path / "b", dataclasses.replace(SPEC, shards=3))
    assert len(weight_files(shards)) == 3
    assert torch.equal(logits(shards), whole)
    (shards / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(shards), whole)


@pytest.mark.parametrize(
    "rename",
    [
        {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head"},
        {"model.language_model.": "model.", "model.visual.": "visual."},
        {"model.language_model.": "", "mtp.": ""},
    ],
)
def test_other_prefixes(tmp_path: Path, rename: dict[str, str]) -> None:
    path = make_checkpoint(tmp_path, SPEC)
    expected = logits(path)
    if "" in rename.values():
        tensors = load_file(path / "model.safetensors")
        plain = {name.removeprefix("model.language_model."): t for name, t in tensors.items()}
        save_file(plain | {"mtp.fc.weight": torch.zeros(2)}, path / "model.safetensors")
    else:
        rewrite(path, rename)
    assert torch.equal(logits(path), expected)


def test_text_model_with_the_language_prefix(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, TEXT)
    expected = logits(path)
    rewrite(path, {"model.": "model.language_model."})
    assert torch.equal(logits(path), expected)


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, MOE)
    expected = logits(path)
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        base, _, kind = name.rpartition(".")
        for expert, weight in enumerate(tensor if kind.endswith("up_proj") else []):
            gate, up = weight.chunk(2)
            tensors[f"{base}.{expert}.gate_proj.weight"] = gate.clone()
            tensors[f"{base}.{expert}.up_proj.weight"] = up.clone()
        if kind == "down_proj":
            for expert, weight in enumerate(tensor):
                tensors[f"{base}.{expert}.down_proj.weight"] = weight.clone()
        if not base.endswith("experts"):
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    assert torch.equal(logits(path), expected)


def test_tied_embeddings_without_and_beside_a_stored_head(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dataclasses.replace(SPEC, tied_embeddings=True))
    expected = logits(path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(512, 64)}, path / "model.safetensors")
    assert torch.equal(logits(path), expected)


def test_a_stored_head_counts_where_the_file_says_nothing(tmp_path: Path) -> None:
    """InternVL's class ties embeddings by default, and transformers' loader not beside a head."""
    spec = SPECS["internvl"]
    assert not spec.tied_embeddings
    path = make_checkpoint(tmp_path, spec)
    config = json.loads((path / "config.json").read_text())
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps(config))
    assert not read_spec(path).tied_embeddings
    expected = oracle.logits(path, {"input_ids": torch.tensor([TOKENS])})
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=0)
    assert read_spec(path / "config.json").tied_embeddings, "alone, the class decides"


def test_attention_biases(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, TEXT)
    config = json.loads((path / "config.json").read_text()) | {"attention_bias": True}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for part, rows in (("q", 256), ("k", 64), ("v", 64), ("o", 64)):
        tensors[f"model.layers.3.self_attn.{part}_proj.bias"] = torch.randn(rows)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    expected = oracle.logits(path, {"input_ids": torch.tensor([TOKENS])})
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("drop", "complaint"),
    [
        ("lm_head", "no lm_head.weight and does not tie"),
        ("model.language_model.embed_tokens", "no embed_tokens.weight"),
        ("model.language_model.layers.1.linear_attn.A_log", "no model.language_model.layers.1"),
        ("model.language_model.layers.3.mlp.up", "no model.language_model.layers.3.mlp.up_proj"),
        ("model.visual.blocks.1.attn.qkv.bias", "no model.visual.blocks.1.attn.qkv.bias"),
        ("model.visual.patch_embed", "no patch_embed"),
    ],
)
def test_missing_tensors_are_named(tmp_path: Path, drop: str, complaint: str) -> None:
    path = make_checkpoint(tmp_path, SPEC)
    rewrite(path, {drop: ""})
    with pytest.raises(CheckpointError, match=complaint):
        load_model(path, torch.float32, "cpu")


def test_wrong_shapes_and_types_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, SPEC)
    tensors = load_file(path / "model.safetensors")
    norm = "model.language_model.norm.weight"
    save_file(tensors | {norm: torch.zeros(63)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm.weight has shape \[63\].* \[64\]"):
        load_model(path, torch.float32, "cpu")
    save_file(tensors | {norm: torch.zeros(64, dtype=torch.int8)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="int8, which is not supported"):
        load_model(path, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_are_named(tmp_path: Path, dtype: str, value: float) -> None:
    path = make_checkpoint(tmp_path, dataclasses.replace(MOE, dtype=dtype))
    tensors = load_file(path / "model.safetensors")
    for part in ("embed_tokens", "norm", "experts.down_proj", "A_log", "visual.patch_embed.proj"):
        name = next(each for each in reversed(tensors) if part in each)
        broken = tensors[name].clone()
        broken.view(-1)[-1] = value
        save_file(tensors | {name: broken}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{name} holds values that are NaN or infinite"):
            load_model(path, torch.float32, "cpu")


def test_broken_files_are_named_without_their_path(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dataclasses.replace(SPEC, shards=2))
    index = path / "model.safetensors.index.json"
    shard = path / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()

    def complaint(text: str) -> None:
        with pytest.raises(CheckpointError, match=text) as caught:
            load_model(path, torch.float32, "cpu")
        assert str(path) not in str(caught.value)

    shard.write_bytes(content[: len(content) // 2])
    complaint("00002-of-00002.safetensors is not a readable")
    shard.unlink()
    complaint("names model-00002-of-00002.safetensors, which is missing")
    index.write_text('{"weight_map": {"a": "../x.safetensors"}}')
    complaint("outside the checkpoint")
    index.write_text("{")
    complaint("cannot be read")
    index.unlink()
    for file in path.glob("*.safetensors"):
        file.unlink()
    complaint("no safetensors files")


def test_towers_that_do_not_fit_the_language_model(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, SPEC)
    config = json.loads((path / "config.json").read_text())
    config["vision_config"]["out_hidden_size"] = 32
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="out_hidden_size"):
        load_model(path, torch.float32, "cpu")


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    with pytest.raises(ModelNotFoundError, match="neither a directory nor"):
        resolve_checkpoint("/no/such/place")
    fetched: list[str] = []

    def snapshot_download(name: str, **_: object) -> str:
        fetched.append(name)
        if name in failures:
            raise failures[name][0]
        return str(tmp_path)

    def answered(status: int) -> Any:
        return httpx.Response(status, request=httpx.Request("GET", "https://hub"))

    failures: dict[str, tuple[Exception, str]] = {
        "some/none": (
            errors.RepositoryNotFoundError("no", response=answered(404)),
            "has no such model",
        ),
        "some/gated": (errors.GatedRepoError("no", response=answered(403)), "accepted its terms"),
        "some/ill": (
            errors.HfHubHTTPError("no", response=answered(502)),
            "answered with status 502",
        ),
        "some/off": (errors.LocalEntryNotFoundError("no"), "could not be reached"),
        "some/unknown": (OSError("offline"), "could not be reached"),
        "some/full": (OSError(28, "No space left on device"), "No space left on device"),
    }

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_checkpoint("some/model-1.5") == tmp_path
    for name, (_, complaint) in failures.items():
        with pytest.raises(ModelNotFoundError, match=f"'{name}' is no directory, .*{complaint}"):
            resolve_checkpoint(name)
    assert fetched == ["some/model-1.5", *failures]


def test_loading_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, SPEC)
    monkeypatch.setattr("vlm_serve.models.weights._TELL_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        load_model(path, torch.float32, "cpu")
    shares = [int(share) for share in re.findall(r"(\d+) % of the weights", caplog.text)]
    assert len(shares) > 10 and shares == sorted(shares)
    assert 90 <= shares[-1] <= 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decay_rates_and_the_norm_of_a_state_layer_keep_their_float32(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Qwen3.5's files hold exactly these in float32, whatever the rest is."""
    path = make_checkpoint(tmp_path, dataclasses.replace(SPEC, dtype="bfloat16"))
    tensors = load_file(path / "model.safetensors")
    layer = "model.language_model.layers.0.linear_attn"
    exact = {
        f"{layer}.{name}": tensors[f"{layer}.{name}"].float() * (1 + 2**-11) + 2**-11
        for name in ("A_log", "norm.weight")
    }
    assert all(not torch.equal(each, each.to(dtype).float()) for each in exact.values())
    save_file(tensors | exact, path / "model.safetensors")
    mixer: Any = load_model(path, dtype, "cpu")._decoder.layers[0].mixers[0]
    assert torch.equal(mixer.neg_decay, -exact[f"{layer}.A_log"].exp())
    assert torch.equal(mixer.norm, exact[f"{layer}.norm.weight"])
