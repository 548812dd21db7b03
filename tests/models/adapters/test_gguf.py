"""An adapter in llama.cpp's file is the one that PEFT saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from gguf import GGMLQuantizationType as Kind
from make_checkpoint import make_checkpoint
from peft_folders import linears, random_adapter, random_factors, write_adapter
from safetensors.torch import load_file

from vlm_serve.errors import CheckpointError
from vlm_serve.models import load_model
from vlm_serve.models.adapters import place, read_adapter

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Tensors = dict[str, torch.Tensor]


def converted(folder: Path) -> Tensors:
    """The factors by their names in files."""
    found = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        match = re.fullmatch(r".*layers\.(\d+)\.(.+)\.lora_([AB])\.weight", name)
        head = re.fullmatch(r".*lm_head\.lora_([AB])\.weight", name)
        if head:
            found[f"output.weight.lora_{head[1].lower()}"] = tensor
        elif match:
            found[f"blk.{match[1]}.{_NAMES[match[2]]}.weight.lora_{match[3].lower()}"] = tensor
    return found


def write(
    target: Path, tensors: Mapping[str, torch.Tensor], alpha: float | None = 8.0, kind: str = "lora"
) -> Path:
    """Write what convert_lora_to_gguf.py does."""
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if tensor.dtype == torch.float32 and "q8" in target.name and tensor.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, Kind.Q8_0), raw_dtype=Kind.Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("adapter")
    spec = CheckpointSpec(family="qwen3", vision_depth=0)
    checkpoint = make_checkpoint(folder / "model", spec)
    only = [*(name.partition(".")[2] for name in _NAMES), "lm_head"]
    return checkpoint, random_adapter(checkpoint, folder / "peft", 3, only=only, rank=4)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_it_is_the_same_adapter(
    made: tuple[Path, Path], tmp_path: Path, dtype: torch.dtype | None
) -> None:
    checkpoint, folder = made
    modules = load_model(checkpoint, torch.float32, "cpu").modules
    file = write(tmp_path / "a.gguf", converted(folder))
    theirs, ours = (place(read_adapter(each, dtype), modules) for each in (folder, file))
    assert ours.digest == theirs.digest
    half = write(tmp_path / "half.gguf", {k: v.half() for k, v in converted(folder).items()})
    assert read_adapter(half).max_rank == 4
    coded = place(read_adapter(write(tmp_path / "q8.gguf", converted(folder))), modules)
    for name, change in theirs.modules.items():
        other = coded.modules[name]
        for one, two in (change.down, other.down), (change.up, other.up):
            assert (one.float() - two.float()).abs().max() <= one.float().abs().max() / 100
    bare = read_adapter(write(tmp_path / "bare.gguf", converted(folder), alpha=None))
    assert {change.scale for change in bare.modules.values()} == {1.0}


def test_experts(tmp_path: Path) -> None:
    """llama.cpp stacks those of a layer."""
    spec = CheckpointSpec(family="qwen3", vision_depth=0, num_experts=4)
    checkpoint = make_checkpoint(tmp_path / "model", spec)
    modules = load_model(checkpoint, torch.float32, "cpu").modules
    name, sizes = "layers.0.mlp.experts.{}.up_proj", modules.experts
    own = {f"model.{name.format(i)}": sizes[name.format(i)] for i in range(4)}
    tensors = random_factors(own, 1)
    folder = write_adapter(tmp_path / "peft", tensors)
    stacks = {
        f"blk.0.ffn_up_exps.weight.lora_{kind.lower()}": torch.stack(
            [
                tensors[f"base_model.model.model.{name.format(i)}.lora_{kind}.weight"]
                for i in range(4)
            ]
        )
        for kind in "AB"
    }
    file = write(tmp_path / "a.gguf", stacks)
    theirs, ours = (
        place(read_adapter(each), modules, ("gate_up_proj",)) for each in (folder, file)
    )
    assert ours.digest == theirs.digest


def _without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {own: each for own, each in tensors.items() if own != name}


Q = "blk.0.attn_q.weight.lora_"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_without(f"{Q}b"), r"lacks a factor of layers\.0\.self_attn\.q_proj"),
        (lambda t: t | {f"{Q}a": t[f"{Q}a"][:3].contiguous()}, "or has another rank"),
        (lambda t: t | {f"{Q}a": t[f"{Q}a"] * float("nan")}, "lora_A of layers.0.* NaN or inf"),
        (lambda t: {name: each * 1e25 for name, each in t.items()}, "too large for float32"),
        (lambda t: t | {"blk.0.attn_qkv.weight.lora_a": t[f"{Q}a"]}, "name the adapter's folder"),
        (lambda t: t | {"blk.0.attn_norm.weight": t[f"{Q}a"][0]}, "name the adapter's folder"),
        (lambda t: t | {"token_embd.weight.lora_a": t[f"{Q}a"]}, "name the adapter's folder"),
        (
            lambda t: t | {"blk.0.ffn_up_exps.weight.lora_a": t[f"{Q}a"]},
            "name the adapter's folder",
        ),
    ],
)
def test_what_is_refused(
    made: tuple[Path, Path], change: Callable[[Tensors], Tensors], told: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.gguf", change(converted(made[1])))
    with pytest.raises(CheckpointError, match=told):
        read_adapter(file)


def test_files_of_another_kind(made: tuple[Path, Path], tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", converted(made[1]), kind="control")
    with pytest.raises(CheckpointError, match=r"a\.gguf is no adapter: its adapter\.type is not"):
        read_adapter(file)
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + b"\0" * 20)
    with pytest.raises(CheckpointError, match=r"b\.gguf has version 0"):
        read_adapter(tmp_path / "b.gguf")
    assert len(linears(made[0])) > 7
