"""Damaged quantised checkpoints are refused in one sentence that names the tensor; odd ones that
are legitimate are not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from safetensors.torch import load_file, save_file

from vlm_serve.cli import main
from vlm_serve.errors import CheckpointError
from vlm_serve.models import load_model
from vlm_serve.models.identity import fingerprint

SPEC = CheckpointSpec(num_layers=1, vision_depth=0, full_attention_interval=1, dtype="bfloat16")
UP = "model.layers.0.mlp.up_proj"
NAN, INFINITE = float("nan"), float("inf")
Change = Callable[[torch.Tensor], torch.Tensor | None]


def damaged(path: Path, kind: str, changes: dict[str, Change]) -> Path:
    """A checkpoint with some tensors of a projection changed, or dropped."""
    made = make_checkpoint(path, dataclasses.replace(SPEC, quantization=kind))
    tensors = load_file(made / "model.safetensors")
    for name, change in changes.items():
        changed = change(tensors.pop(f"{UP}.{name}"))
        if changed is not None:
            tensors[f"{UP}.{name}"] = changed.contiguous()
    save_file(tensors, made / "model.safetensors")
    return made


def first(value: float) -> Change:
    """With that value in the first place."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def dropped(tensor: torch.Tensor) -> None:
    return None


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :-1]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.long()


SCALES = {
    "fp8": "weight_scale_inv",
    "gptq": "scales",
    "awq": "scales",
    "int4": "weight_scale",
    "int8": "weight_scale",
    "fp8-channel": "weight_scale",
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dropped, "the checkpoint has no {}"),
        (first(NAN), "{} holds scales that are NaN or infinite"),
        (first(INFINITE), "{} holds scales that are NaN or infinite"),
        (first(-1.0), "{} holds negative scales"),
        (lambda tensor: tensor[..., None], "{} has shape"),
        (lambda tensor: tensor.to(torch.int32), "{} is int32, not a type of scales"),
    ],
)
def test_scales(tmp_path: Path, kind: str, change: Change, complaint: str) -> None:
    path = damaged(tmp_path, kind, {SCALES[kind]: change})
    with pytest.raises(CheckpointError, match=complaint.format(f"{UP}.{SCALES[kind]}")):
        load_model(path, torch.float32, "cpu")


@pytest.mark.parametrize("kind", SCALES)
def test_scales_of_zero_are_legitimate(tmp_path: Path, kind: str) -> None:
    path = damaged(tmp_path, kind, {SCALES[kind]: first(0.0)})
    assert f"{UP}.weight" in load_model(path, torch.float32, "cpu").quantised


@pytest.mark.parametrize(
    ("kind", "name", "change", "complaint"),
    [
        ("fp8", "weight", first(NAN), "weight holds values that are NaN"),
        ("fp8", "weight", shorter, "weight has shape .128, 63., the config implies .128, 64."),
        ("gptq", "qweight", shorter, "qweight has shape"),
        ("gptq", "qweight", wide, "qweight is int64, its format has int32"),
        ("gptq", "qzeros", dropped, "has no .*qzeros"),
        ("gptq", "qzeros", first(0), "qzeros are not those of symmetric weights"),
        ("gptq", "g_idx", shorter, "g_idx has shape"),
        ("awq", "qweight", shorter, "qweight has shape"),
        ("awq", "qzeros", dropped, "has no .*qzeros"),
        ("awq", "qzeros", wide, "qzeros is int64"),
        ("int4", "weight_packed", shorter, "weight_packed has shape"),
        ("int4", "weight_packed", wide, "weight_packed is int64"),
        ("int4", "weight_shape", first(7), r"weight_shape says .7, 64., the config implies"),
        ("int4", "weight_shape", dropped, "has no .*weight_shape"),
        ("int4-asymmetric", "weight_zero_point", dropped, "has no .*weight_zero_point"),
        ("int4-asymmetric", "weight_zero_point", shorter, "weight_zero_point has shape"),
    ],
)
def test_codes(tmp_path: Path, kind: str, name: str, change: Change, complaint: str) -> None:
    path = damaged(tmp_path, kind, {name: change})
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load_model(path, torch.float32, "cpu")
    assert UP in str(caught.value)


def reconfigured(path: Path, **changes: object) -> Path:
    config = json.loads((path / "config.json").read_text())
    fields = config.pop("quantization_config") | changes
    if changes:
        config["quantization_config"] = fields
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_groups_that_do_not_fit(tmp_path: Path) -> None:
    path = reconfigured(damaged(tmp_path, "gptq", {}), group_size=128)
    with pytest.raises(CheckpointError, match="groups of 128 do not fit the 64 columns of model"):
        load_model(path, torch.float32, "cpu")


def test_an_order_of_columns_that_the_config_speaks_of_must_be_stored(tmp_path: Path) -> None:
    path = reconfigured(damaged(tmp_path, "gptq", {}), desc_act=True)
    load_model(path, torch.float32, "cpu")
    damaged(tmp_path, "gptq", {"g_idx": dropped})
    load_model(path, torch.float32, "cpu")
    reconfigured(path, desc_act=True)
    with pytest.raises(CheckpointError, match=f"no {UP}.g_idx, which desc_act asks for"):
        load_model(path, torch.float32, "cpu")


@pytest.mark.parametrize("kind", ["gptq", "int4"])
def test_a_config_that_says_nothing_of_it(tmp_path: Path, kind: str) -> None:
    path = reconfigured(damaged(tmp_path, kind, {}))
    with pytest.raises(CheckpointError, match="is quantised, but config.json has no quantization_"):
        load_model(path, torch.float32, "cpu")


def test_a_server_ends_before_it_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged(tmp_path, "awq", {"scales": first(NAN)})
    assert main(["serve", str(path), "--port", "0", "--device", "cpu"]) != 0
    told = capsys.readouterr().err
    assert f"{UP}.scales holds scales that are NaN" in told and "Traceback" not in told


def test_codes_and_config_are_part_of_the_identity(tmp_path: Path) -> None:
    """Equal weights in two formats, another code, another rule: each has a cache of its own."""
    found = {
        fingerprint(damaged(tmp_path / "a", "gptq", {})),
        fingerprint(damaged(tmp_path / "b", "int4", {})),
        fingerprint(damaged(tmp_path / "c", "gptq", {"qweight": first(1)})),
        fingerprint(reconfigured(damaged(tmp_path / "d", "gptq", {}), sym=False)),
    }
    assert len(found) == 4
