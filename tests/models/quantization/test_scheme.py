"""Which tensor has which format: the words of published config.json files, and those that are
refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantised_configs import (
    AUTO_ROUND,
    AWQ,
    CHANNEL,
    FP8,
    GPTQ,
    INT4,
    LAYER,
    MODELOPT,
    MODELOPT_MIXED,
    PACKED,
    scheme,
)
from quantised_weights import FORMATS, quantization_config

from vlm_serve.errors import CheckpointError
from vlm_serve.models.quantization.base import Format
from vlm_serve.models.quantization.float4 import MXFP4, NVFP4
from vlm_serve.models.quantization.float8 import Float8
from vlm_serve.models.quantization.integers import Awq, Gptq, Packed
from vlm_serve.models.quantization.scheme import QuantScheme

MIXED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "float-quantized",
            "weights": CHANNEL,
            "input_activations": CHANNEL | {"strategy": "token", "dynamic": True},
        },
        "group_1": {"targets": ["re:.*mlp.*"], "format": "pack-quantized", "weights": INT4},
        "group_2": {
            "targets": ["model.layers.0.mlp.down_proj"],
            "format": "pack-quantized",
            "weights": INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None},
        },
    },
    "ignore": [],
}


@pytest.mark.parametrize(
    ("fields", "module", "expected"),
    [
        (FP8, "mlp.gate_proj", Float8((128, 128))),
        (FP8, "mlp.experts.3.down_proj", Float8((128, 128))),
        (FP8, "linear_attn.in_proj_qkv", Float8((128, 128))),
        (FP8, "linear_attn.in_proj_a", None),
        (FP8, "mlp.gate", None),
        (FP8 | {"weight_block_size": None}, "mlp.up_proj", Float8(None)),
        (FP8 | {"modules_to_not_convert": ["self_attn"]}, "self_attn.q_proj", None),
        (FP8 | {"modules_to_not_convert": [r".*\d+\.mlp"]}, "mlp.up_proj", None),
        (FP8 | {"modules_to_not_convert": [], "ignored_layers": ["mlp"]}, "mlp.up_proj", None),
        (GPTQ, "mlp.gate_proj", Gptq(4, 128, 1, True)),
        (GPTQ, "mlp.experts.3.up_proj", Gptq(4, 128, 1, True)),
        (GPTQ, "mlp.shared_expert.up_proj", None),
        (GPTQ, "self_attn.q_proj", None),
        (GPTQ, "linear_attn.out_proj", None),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, "mlp.up_proj", Gptq(4, 128, 0, True)),
        (GPTQ | {"format": "gptq_v2"}, "mlp.up_proj", Gptq(4, 128, 0, True)),
        (
            GPTQ | {"dynamic": {r"+:.*\.0\.mlp\.up.*": {"bits": 8, "group_size": 32}}},
            "mlp.up_proj",
            Gptq(8, 32, 1, True),
        ),
        (AWQ, "mlp.gate_proj", Awq(4, 128)),
        (AWQ, "linear_attn.in_proj_a", None),
        (PACKED, "mlp.gate_proj", Packed(4, 128, True)),
        (PACKED, "linear_attn.in_proj_a", None),
        (MIXED, "self_attn.q_proj", Float8(None)),
        (MIXED, "mlp.gate_proj", Packed(4, 128, True)),
        (MIXED, "mlp.down_proj", Packed(8, -1, True)),
        (FORMATS["nvfp4"].config([], 32), "mlp.up_proj", NVFP4),
        (FORMATS["mxfp4"].config([], 32), "mlp.up_proj", MXFP4),
    ],
)
def test_formats_of_modules(fields: Any, module: str, expected: Format | None) -> None:
    found = scheme(fields)
    assert found.format_of(f"{LAYER}{module}.weight") == expected
    assert found.expected(f"{LAYER}{module}.weight") == expected


@pytest.mark.parametrize("fields", [FP8, GPTQ, AWQ, PACKED])
@pytest.mark.parametrize("weight", ["model.visual.blocks.0.attn.qkv.weight", "lm_head.weight"])
def test_what_is_usually_dense_is_expected_to_be(fields: Any, weight: str) -> None:
    assert scheme(fields).expected(weight) is None


@pytest.mark.parametrize("kind", FORMATS)
def test_the_config_may_be_with_the_language_model_or_have_an_older_name(kind: str) -> None:
    names = ("lm_head.weight", "model.layers.0.mlp.up_proj.weight")
    fields = quantization_config({name: torch.zeros(64, 64) for name in names}, kind, 32)
    expected = QuantScheme.of({"quantization_config": fields})
    assert expected is not None and expected.expected("lm_head.weight") is None
    assert QuantScheme.of({"text_config": {"quantization_config": fields}}) == expected
    assert QuantScheme.of({"compression_config": fields}) == expected
    assert QuantScheme.of({"quantization_config": None, "text_config": {}}) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (FP8, "fp8; made for quantised activations (dynamic, in FP8), which is not followed"),
        (
            FP8 | {"activation_scheme": "static"},
            "fp8; made for quantised activations (static input_scale), which is not followed",
        ),
        (GPTQ, "gptq; made for activations as they are"),
        (MIXED, "compressed-tensors; made for quantised activations (dynamic, in FP8), which"),
        (
            PACKED | {"kv_cache_scheme": {"num_bits": 8}},
            "(8-bit keys and values), which is not followed",
        ),
    ],
)
def test_what_is_said_about_activations(fields: Any, said: str) -> None:
    assert said in str(scheme(fields))


def group(**changes: Any) -> dict[str, Any]:
    """A config whose only group differs."""
    return PACKED | {"config_groups": {"group_0": PACKED["config_groups"]["group_0"] | changes}}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' in quantization_config is"),
        (
            {"quant_method": "quark"},
            "not supported; supported are fp8, gptq, awq, compressed-tensors, modelopt",
        ),
        ({"quant_method": ["fp8"]}, "quant_method .'fp8'. in quantization_config is not supported"),
        ({"bits": 4}, "quant_method None"),
        ("fp8", "quantization_config in config.json must be an object, not 'fp8'"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' in quantization_config is not supported, only 'e4m3'"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        (FP8 | {"activation_scheme": "none"}, "activation_scheme 'none'"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size .* must be two sizes, not .128."),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size"),
        (FP8 | {"weight_block_size": "12"}, "weight_block_size"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert .* list of names"),
        (FP8 | {"modules_to_not_convert": ["(["]}, "no regular expression"),
        (GPTQ | {"bits": 3}, "bits 3 in quantization_config is not supported, only 4 or 8"),
        (GPTQ | {"bits": True}, "bits True"),
        (GPTQ | {"group_size": 100}, "group_size 100"),
        (GPTQ | {"group_size": None}, "group_size None"),
        (GPTQ | {"sym": "yes"}, "sym in quantization_config must be true or false, not 'yes'"),
        (GPTQ | {"checkpoint_format": "bitblas"}, "checkpoint_format 'bitblas' .*; serve the che"),
        (GPTQ | {"dynamic": {"+:mlp": {"bits": 2}}}, "bits 2"),
        (GPTQ | {"dynamic": {"+:mlp": 4}}, "dynamic .* must be an object"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "no regular expression"),
        (GPTQ | {"dynamic": ["mlp"]}, "dynamic of quantization_config .* must be an object"),
        (AWQ | {"bits": 3}, "bits 3"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (PACKED | {"config_groups": {}}, "no config_groups with targets"),
        (
            PACKED | {"format": "nvfp4-pack-quantized"},
            "4-bit int weights as 'nvfp4-pack-quantized'",
        ),
        (
            group(weights={"num_bits": 6, "type": "float"}, format="mxfp6-pack-quantized"),
            "group_0 of quantization_config stores 6-bit float weights as 'mxfp6-pack-quantized', "
            "which is not supported",
        ),
        (group(weights=INT4 | {"type": "float"}, format="mxfp4-pack-quantized"), "group_size 128"),
        (
            group(
                weights={"num_bits": 4, "type": "float", "symmetric": False},
                format="nvfp4-pack-quantized",
            ),
            "symmetric False in weights of group_0",
        ),
        (group(weights=INT4 | {"num_bits": 2}), "num_bits 2 in weights of group_0"),
        (group(weights=INT4 | {"group_size": 7}), "group_size 7 in weights of group_0"),
        (group(weights=INT4 | {"strategy": "token"}), "strategy 'token' in weights of group_0"),
        (group(weights=INT4 | {"actorder": "group"}), "actorder 'group' .*; serve the che"),
        (group(weights=CHANNEL | {"strategy": "group"}, format="float-quantized"), "group_size No"),
        (group(weights=CHANNEL | {"strategy": "token"}, format="float-quantized"), "for FP8"),
        (group(weights=CHANNEL | {"strategy": "block"}, format="float-quantized"), "block_struct"),
        (group(targets="Linear"), "targets in group_0 of quantization_config must be a list"),
        (PACKED | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        (PACKED | {"ignore": ["re:("]}, "no regular expression"),
    ],
)
def test_what_is_not_supported_is_named(fields: Any, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        scheme(fields)


@pytest.mark.parametrize(
    ("kind", "integers"),
    [
        ("fp8", False),
        ("fp8-channel", False),
        ("awq", True),
        ("mixed", True),
        ("nvfp4", True),
        ("nvfp4-modelopt", True),
    ],
)
def test_whether_weights_are_integers(kind: str, integers: bool) -> None:
    """Beside those, and no others, activations may become integers."""
    assert scheme(FORMATS[kind].config([], 32)).integers is integers


class Held:
    """A checkpoint of one tensor."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __contains__(self, name: str) -> bool:
        return name == self._name

    def shape_of(self, name: str) -> None:
        return None

    def stored(self, name: str) -> torch.Tensor:
        return torch.zeros(4, 4)


def test_a_dense_tensor_is_dense_whatever_the_config_says() -> None:
    weight = f"{LAYER}mlp.up_proj.weight"
    for fields in (FP8, GPTQ, AWQ, PACKED):
        assert scheme(fields).stored_format(weight, Held(weight)) is None


def test_a_quantised_tensor_that_the_config_calls_dense_is_refused() -> None:
    held = Held(f"{LAYER}self_attn.q_proj.qweight")
    with pytest.raises(CheckpointError, match="q_proj.qweight is quantised, but quantization_conf"):
        scheme(GPTQ).stored_format(f"{LAYER}self_attn.q_proj.weight", held)


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        (GPTQ | {"quant_method": "gptq_marlin"}, GPTQ),
        (GPTQ | {"checkpoint_format": "marlin"}, GPTQ),
        (GPTQ | {"quant_method": "moe_wna16"}, GPTQ),
        ({**GPTQ, "quant_method": None, "method": "gptq"}, GPTQ),
        (AWQ | {"quant_method": "awq_marlin"}, AWQ),
        (AWQ | {"version": "marlin"}, AWQ),
        (AWQ | {"quant_method": "moe_wna16"}, AWQ),
        ({**AWQ, "quant_method": None, "method": "awq"}, AWQ),
        (AUTO_ROUND | {"quant_method": "intel/auto-round"}, AUTO_ROUND),
        (MODELOPT | {"quant_method": "modelopt_fp4"}, MODELOPT),
        (MODELOPT_MIXED | {"quant_method": "modelopt_mixed"}, MODELOPT_MIXED),
    ],
)
def test_other_names_of_a_method(fields: Any, same: Any) -> None:
    assert scheme(fields) == scheme(same)


@pytest.mark.parametrize(
    "method",
    ["bitsandbytes", "hqq", "torchao", "exl2", "exl3", "fbgemm_fp8", "quark", "aqlm", "eetq"],
)
def test_other_methods_have_a_way_out(method: str) -> None:
    way = f"quant_method '{method}' .*serve the checkpoint that it was made from, with --quantiz"
    with pytest.raises(CheckpointError, match=way):
        scheme({"quant_method": method, "bits": 4, "group_size": 64})


def test_sparse_weights_have_a_way_out() -> None:
    for fields in (
        PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        group(format="marlin-24"),
    ):
        with pytest.raises(CheckpointError, match="24.* is not supported.*; serve the checkpoint"):
            scheme(fields)
