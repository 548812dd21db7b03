"""Formats of published checkpoints that are others' under another name, or rare: they load to the
values that their writers meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from model_driver import Driver, text_sequence
from quantised_configs import CHANNEL, PACKED
from safetensors.torch import load_file, save_file

from vlm_serve.errors import CheckpointError
from vlm_serve.models import load_model
from vlm_serve.models.registry import spec_of

DENSE = CheckpointSpec(
    num_layers=4, intermediate_size=160, dtype="bfloat16", vision_depth=0, full_attention_interval=2
)
MOE = CheckpointSpec(
    num_layers=2,
    full_attention_interval=2,
    num_experts=4,
    moe_intermediate_size=64,
    dtype="bfloat16",
    vision_depth=0,
    family="qwen3_next",
)
TOKENS = [(5 * index * index + 11) % 400 for index in range(40)]
Tensors = dict[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn


def opened(path: Path, compiled: bool) -> Driver:
    stored = torch.bfloat16 if compiled else torch.float32
    model = load_model(path, stored, "cpu", compute_dtype=torch.float32, compiled=compiled)
    return Driver(model)


def logits(path: Path, compiled: bool) -> torch.Tensor:
    return opened(path, compiled).prefill(text_sequence(TOKENS))


def agree(codes: Path, numbers: Path, compiled: bool) -> None:
    """Logits and greedy tokens are those of transformers on the values of the codes."""
    inputs = {"input_ids": torch.tensor([TOKENS])}
    expected = oracle.logits(numbers, inputs)
    torch.testing.assert_close(logits(codes, compiled), expected, atol=1e-4, rtol=0)
    found = opened(codes, compiled).generate(text_sequence(TOKENS), 24)
    assert found == oracle.greedy(numbers, inputs, 24)


def rewritten(path: Path, change: Callable[[Tensors, dict[str, Any]], Tensors]) -> Path:
    """Change a checkpoint's tensors and config.json in place."""
    config = json.loads((path / "config.json").read_text())
    tensors = change(load_file(path / "model.safetensors"), config)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def projections(tensors: Tensors) -> list[str]:
    """Names of the weights that published checkpoints quantise."""
    return [
        name
        for name in tensors
        if name.endswith("_proj.weight") or name.endswith(("in_proj_qkv.weight", "qkvz.weight"))
    ]


def as_auto_round(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    dense = [name.removesuffix(".weight") for name, each in tensors.items() if each.ndim <= 2]
    codes = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    config["quantization_config"] = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": config["quantization_config"]["group_size"],
        "sym": config["quantization_config"]["sym"],
        "data_type": "int",
        "iters": 200,
        "autoround_version": "0.14.2",
        "extra_config": {
            name: {"bits": 16, "data_type": "float"}
            for name in dense
            if not any(name.startswith(each) for each in codes)
        }
        | {r".*\.mtp\..*": {"bits": 16}},
    }
    return tensors


@pytest.mark.parametrize("compiled", [False, True])
def test_auto_round_holds_the_tensors_of_gptq(tmp_path: Path, compiled: bool) -> None:
    spec = CheckpointSpec(**DENSE.__dict__ | {"quantization": "gptq"})
    expected = logits(make_checkpoint(tmp_path / "gptq", spec), compiled)
    path = rewritten(make_checkpoint(tmp_path / "auto", spec), as_auto_round)
    assert torch.equal(logits(path, compiled), expected)


def test_a_module_of_auto_round_may_have_a_width_of_its_own() -> None:
    fields = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    fields["extra_config"] = {"model.layers.0.mlp.up_proj": {"bits": 8}, "lm_head": {"bits": 16}}
    scheme = spec_of(_config(fields)).quantization
    assert scheme is not None
    own, other = (scheme.format_of(f"model.layers.{n}.mlp.up_proj.weight") for n in (0, 1))
    assert own is not None and other is not None
    assert own.label.startswith("int8") and other.label.startswith("int4")
    assert scheme.format_of("lm_head.weight") is None


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    from checkpoint_config import text_config

    return text_config(DENSE) | {"quantization_config": fields}


def as_blocks_of_modelopt(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    found: Tensors = {}
    for name, each in tensors.items():
        if name.endswith("weight_scale_inv"):
            found[name.removesuffix("_inv")] = each.float()[:, None, :, None]
        else:
            found[name] = each
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_of_modelopt_are_those_of_fp8(tmp_path: Path, compiled: bool) -> None:
    spec = CheckpointSpec(**DENSE.__dict__ | {"quantization": "fp8"})
    expected = logits(make_checkpoint(tmp_path / "fp8", spec), compiled)
    path = rewritten(make_checkpoint(tmp_path / "modelopt", spec), as_blocks_of_modelopt)
    torch.testing.assert_close(logits(path, compiled), expected, atol=1e-4, rtol=0)
    named = {"quant_algo": "FP8_BLOCK_SCALES"}
    rewritten(path, lambda t, c: c["quantization_config"].update(named) or t)
    torch.testing.assert_close(logits(path, compiled), expected, atol=1e-4, rtol=0)


def mxfp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Codes with an exponent of two for each 32 columns, and their values."""
    rows, depth = weight.shape
    groups = weight.float().view(rows, depth // 32, 32)
    exponents = (groups.abs().amax(-1).clamp_min(1e-9) / 448).log2().ceil()
    codes = (groups / exponents.exp2()[..., None]).to(E4M3)
    plain = (codes.float() * exponents.exp2()[..., None]).view(rows, depth)
    stored = (exponents + 127).to(torch.uint8)
    return {"": codes.view(rows, depth), "_scale": stored}, plain


MXFP8 = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                    "scale_dtype": "torch.uint8",
                },
            }
        },
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32},
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("writer", MXFP8)
@pytest.mark.parametrize("spec", [DENSE, MOE], ids=["dense", "moe"])
def test_mxfp8(tmp_path: Path, spec: CheckpointSpec, writer: str, compiled: bool) -> None:
    def quantise(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        config["quantization_config"] = MXFP8[writer]
        for name in projections(tensors):
            codes, _ = mxfp8(tensors.pop(name))
            tensors |= {name + suffix: each for suffix, each in codes.items()}
        return tensors

    def plain(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        values = {name: mxfp8(tensors[name])[1] for name in projections(tensors)}
        return {name: each.float() for name, each in tensors.items()} | values

    numbers = rewritten(make_checkpoint(tmp_path / "plain", spec), plain)
    agree(rewritten(make_checkpoint(tmp_path / "codes", spec), quantise), numbers, compiled)


def float8_groups(weight: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
    """e4m3 codes with a scale for each group of columns of a row, and their values."""
    rows, depth = weight.shape
    parts = weight.float().view(rows, depth // group, group)
    factors = (parts.abs().amax(-1).clamp_min(1e-9) / 448).bfloat16()
    codes = (parts / factors.float()[..., None]).to(E4M3)
    plain = codes.float() * factors.float()[..., None]
    return {"": codes.view(rows, depth), "_scale": factors}, plain.view(rows, depth)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("group", [32, 128])
def test_float8_in_groups_of_columns(tmp_path: Path, group: int, compiled: bool) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "attention_heads": 8}
    spec = CheckpointSpec(**DENSE.__dict__ | sizes | {"gdn_value_heads": 8, "gdn_key_dim": 32})
    weights = CHANNEL | {"strategy": "group", "group_size": group}
    fields = PACKED | {"format": "float-quantized", "ignore": ["re:.*linear_attn.*", "lm_head"]}
    fields |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}

    def chosen(tensors: Tensors) -> list[str]:
        return [name for name in projections(tensors) if "linear_attn" not in name]

    def quantise(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        config["quantization_config"] = fields
        for name in chosen(tensors):
            codes, _ = float8_groups(tensors.pop(name), group)
            tensors |= {name + suffix: each for suffix, each in codes.items()}
        return tensors

    def plain(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        values = {name: float8_groups(tensors[name], group)[1] for name in chosen(tensors)}
        return {name: each.float() for name, each in tensors.items()} | values

    numbers = rewritten(make_checkpoint(tmp_path / "plain", spec), plain)
    agree(rewritten(make_checkpoint(tmp_path / "codes", spec), quantise), numbers, compiled)


def test_what_is_packed_for_marlin_is_named(tmp_path: Path) -> None:
    spec = CheckpointSpec(**DENSE.__dict__ | {"quantization": "gptq"})

    def repacked(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        config["quantization_config"]["checkpoint_format"] = "marlin"
        return {
            name.replace(".qweight", ".B").replace(".scales", ".s"): each
            for name, each in tensors.items()
            if not name.endswith((".qzeros", ".g_idx"))
        }

    path = rewritten(make_checkpoint(tmp_path, spec), repacked)
    with pytest.raises(CheckpointError, match=r"\.B is packed for Marlin's kernels: serve the"):
        load_model(path, torch.float32, "cpu")


def test_tensors_of_mlx_are_named(tmp_path: Path) -> None:
    """A file whose config.json does not say so."""

    def packed(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        for name in projections(tensors):
            rows, depth = tensors[name].shape
            tensors[name] = torch.zeros(rows, depth // 8, dtype=torch.uint32)
            for part in ("scales", "biases"):
                tensors[name.replace("weight", part)] = torch.ones(rows, depth // 32)
        return tensors

    path = rewritten(make_checkpoint(tmp_path, DENSE), packed)
    with pytest.raises(CheckpointError, match="weight is MLX's, whose weights are not read: serve"):
        load_model(path, torch.float32, "cpu")


def awq8(weight: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
    """Codes of 8 bits in words of four rows, as vLLM unpacks them, and their values."""
    rows, depth = weight.shape
    parts = weight.float().view(rows, depth // group, group)
    low, high = parts.amin(-1), parts.amax(-1)
    factors = ((high - low) / 255).half()
    zeros = (-low / factors.float()).round().clamp(0, 255)
    codes = (parts / factors.float()[..., None] + zeros[..., None]).round().clamp(0, 255)
    plain = ((codes - zeros[..., None]) * factors.float()[..., None]).view(rows, depth)

    def packed(values: torch.Tensor) -> torch.Tensor:
        each = values.to(torch.int64).view(len(values), -1, 4)[..., [0, 2, 1, 3]]
        word = sum(each[..., at] << (8 * at) for at in range(4))
        return torch.as_tensor(word).to(torch.uint32).view(torch.int32)

    stored = {
        "qweight": packed(codes.view(rows, depth).T),
        "qzeros": packed(zeros.T),
        "scales": factors.T,
    }
    return stored, plain


@pytest.mark.parametrize("compiled", [False, True])
def test_awq_of_8_bits(tmp_path: Path, compiled: bool) -> None:
    fields = {"quant_method": "awq", "bits": 8, "group_size": 32, "version": "gemm"}

    def quantise(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        config["quantization_config"] = fields | {"zero_point": False}
        for name in projections(tensors):
            module = name.removesuffix("weight")
            codes, _ = awq8(tensors.pop(name), 32)
            tensors |= {module + suffix: each for suffix, each in codes.items()}
        return tensors

    def plain(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        values = {name: awq8(tensors[name], 32)[1] for name in projections(tensors)}
        return {name: each.float() for name, each in tensors.items()} | values

    numbers = rewritten(make_checkpoint(tmp_path / "plain", DENSE), plain)
    agree(rewritten(make_checkpoint(tmp_path / "codes", DENSE), quantise), numbers, compiled)


def test_awq_without_zero_points_says_what_to_do(tmp_path: Path) -> None:
    spec = CheckpointSpec(**DENSE.__dict__ | {"quantization": "awq"})

    def without(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        config["quantization_config"]["zero_point"] = False
        return {name: each for name, each in tensors.items() if "qzeros" not in name}

    path = rewritten(make_checkpoint(tmp_path, spec), without)
    with pytest.raises(CheckpointError, match="qzeros: AWQ without zero points .* export it with"):
        load_model(path, torch.float32, "cpu")


@pytest.mark.parametrize("scales", ["one", "rows"])
def test_a_convolution_in_fp8_has_the_values_of_its_codes(tmp_path: Path, scales: str) -> None:
    def halves(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = weight.float().flatten(1).abs()
        most = wide.amax() if scales == "one" else wide.amax(1)
        factors = (most / 448).reshape(-1)
        return (weight.float() / factors.view(-1, 1, 1)).to(E4M3), factors

    def quantise(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
        for name in [each for each in tensors if "conv1d" in each]:
            codes, factors = halves(tensors[name])
            tensors[name] = codes
            tensors[name + "_scale"] = factors[0] if scales == "one" else factors
        return tensors

    def plain(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        for name in [each for each in tensors if "conv1d" in each]:
            codes, factors = halves(tensors[name])
            tensors[name] = codes.float() * factors.view(-1, 1, 1)
        return tensors

    expected = logits(rewritten(make_checkpoint(tmp_path / "plain", DENSE), plain), False)
    path = rewritten(make_checkpoint(tmp_path / "codes", DENSE), quantise)
    assert torch.equal(logits(path, False), expected)


def test_a_convolution_in_fp8_without_a_scale_is_named(tmp_path: Path) -> None:
    def quantise(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        name = next(each for each in tensors if "conv1d" in each)
        tensors[name] = tensors[name].to(E4M3)
        return tensors

    path = rewritten(make_checkpoint(tmp_path, DENSE), quantise)
    with pytest.raises(CheckpointError, match=r"no .*conv1d\.weight_scale"):
        load_model(path, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"quant_method": "bitsandbytes"}, "nf4 and int8 .* --quantization int8, int6 or int4"),
        ({"quant_method": "torchao"}, "Python objects; .* compressed-tensors"),
        ({"quant_method": "quark"}, "'quark' .* compressed-tensors"),
        ({"quant_method": "hqq"}, "'hqq' .* with --quantization int8"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllamav2"},
            "packing_format 'auto_round:exllamav2' .* export the model in one",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 128, "data_type": "mx_fp"},
            "data_type 'mx_fp'",
        ),
        (
            {"quant_method": "auto-round", "bits": 3, "group_size": 128, "sym": True},
            "bits 3 .* only 4 or 8",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 16}, "only 32"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3 .* only 4 or 8"),
    ],
)
def test_what_is_not_read_says_what_to_do(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint) as caught:
        spec_of(_config(fields))
    assert "\n" not in caught.value.message
