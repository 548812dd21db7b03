"""ModelOpt's configurations: the words of published exports, in config.json and beside it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from memory_checkpoint import MemoryCheckpoint
from quantised_configs import LAYER, scheme
from quantised_configs import MODELOPT as WHOLE
from quantised_configs import MODELOPT_MIXED as MIXED

from vlm_serve.errors import CheckpointError
from vlm_serve.models import load_model, read_spec
from vlm_serve.models.identity import fingerprint
from vlm_serve.models.quantization.base import Format
from vlm_serve.models.quantization.float4 import MODELOPT_NVFP4 as NVFP4
from vlm_serve.models.quantization.float8 import Float8
from vlm_serve.models.quantization.scheme import QuantScheme


@pytest.mark.parametrize(
    ("fields", "weight", "expected"),
    [
        (WHOLE, f"{LAYER}mlp.up_proj.weight", NVFP4),
        (WHOLE, f"{LAYER}mlp.experts.7.up_proj.weight", NVFP4),
        (WHOLE, f"{LAYER}self_attn.q_proj.weight", None),
        ({**WHOLE, "ignore": ["layers.0.self_attn*"]}, f"{LAYER}self_attn.q_proj.weight", None),
        (WHOLE, f"{LAYER}mlp.gate.weight", None),
        (WHOLE, "mtp.layers.0.mlp.up_proj.weight", None),
        (WHOLE, "lm_head.weight", None),
        (WHOLE | {"quant_algo": "FP8"}, f"{LAYER}mlp.up_proj.weight", Float8(None)),
        (WHOLE | {"quant_algo": None}, f"{LAYER}mlp.up_proj.weight", None),
        (MIXED, f"{LAYER}linear_attn.in_proj_qkv.weight", Float8(None)),
        (MIXED, f"{LAYER}linear_attn.out_proj.weight", Float8(None)),
        (MIXED, f"{LAYER}linear_attn.in_proj_a.weight", None),
        (MIXED, f"{LAYER}mlp.gate_proj.weight", NVFP4),
        (MIXED, f"{LAYER}mlp.experts.3.down_proj.weight", NVFP4),
        (MIXED, f"{LAYER}mlp.up_proj.weight", None),
        (MIXED, "mtp.layers.0.mlp.gate_proj.weight", None),
        (MIXED, "model.visual.blocks.0.attn.qkv.weight", None),
        (MIXED, "lm_head.weight", NVFP4),
    ],
)
def test_formats_of_modules(fields: Any, weight: str, expected: Format | None) -> None:
    assert scheme(fields).format_of(weight) == expected
    assert scheme(fields).expected(weight) == expected


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (WHOLE, "modelopt; made for quantised activations (static input_scale, in FP4), which"),
        (WHOLE | {"quant_algo": "W4A16_NVFP4"}, "modelopt; made for activations as they are"),
        (MIXED, "made for quantised activations (static input_scale, in FP8), which"),
        (MIXED | {"kv_cache_scheme": {"num_bits": 8}}, "in FP8; 8-bit keys and values)"),
    ],
)
def test_what_is_said_about_activations(fields: Any, said: str) -> None:
    assert said in str(scheme(fields))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (WHOLE | {"quant_algo": "MXFP6"}, "quant_algo 'MXFP6' in quantization_config is not supp"),
        (WHOLE | {"group_size": 32}, "group_size 32 in quantization_config is not supported, only"),
        (WHOLE | {"ignore": "lm_head"}, "ignore in quantization_config must be a list of names"),
        (WHOLE | {"quantization": 4}, "quantization of quantization_config .* must be an object"),
        (MIXED | {"quantized_layers": {}}, "quantization_config has no quantized_layers"),
        (MIXED | {"quantized_layers": {"a.b": 4}}, "a.b in quantized_layers of .* an object"),
        (
            MIXED | {"quantized_layers": {"a.b": {"quant_algo": "INT4_AWQ"}}},
            "quant_algo 'INT4_AWQ' in a.b in quantized_layers",
        ),
    ],
)
def test_what_is_not_supported_is_named(fields: Any, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        scheme(fields)


def test_a_head_that_lies_quantised_is_so_though_it_is_excluded() -> None:
    codes, dense = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 16)
    assert (
        scheme(WHOLE).stored_format("lm_head.weight", MemoryCheckpoint({"lm_head.weight": codes}))
        == NVFP4
    )
    assert (
        scheme(WHOLE).stored_format("lm_head.weight", MemoryCheckpoint({"lm_head.weight": dense}))
        is None
    )


SPEC = CheckpointSpec(
    num_layers=2, vision_depth=0, full_attention_interval=2, dtype="bfloat16", tied_embeddings=False
)


def older(path: Path, **changes: object) -> Path:
    """The same checkpoint with its configuration in a file of its own."""
    config = json.loads((path / "config.json").read_text())
    fields = config.pop("quantization_config")
    own = {"quant_algo": fields["quant_algo"], "exclude_modules": fields["ignore"], **changes}
    (path / "config.json").write_text(json.dumps(config))
    beside = {"producer": fields["producer"], "quantization": own}
    (path / "hf_quant_config.json").write_text(json.dumps(beside))
    return path


def test_older_exports_have_a_file_of_their_own(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dataclasses.replace(SPEC, quantization="nvfp4-modelopt"))
    expected, before = read_spec(path).quantization, fingerprint(path)
    quantised = load_model(path, torch.float32, "cpu").quantised
    assert quantised
    found = {before}
    for changes in ({}, {"kv_cache_quant_algo": "FP8"}):
        fields = older(
            make_checkpoint(tmp_path, dataclasses.replace(SPEC, quantization="nvfp4-modelopt")),
            **changes,
        )
        found.add(fingerprint(fields))
    own = read_spec(path).quantization
    assert own is not None and expected is not None
    assert (own.rules, own.default) == (expected.rules, expected.default)
    assert load_model(path, torch.float32, "cpu").quantised == quantised
    assert len(found) == 3, "what decides is part of the identity"


def test_older_exports_that_name_no_method_are_modelopts() -> None:
    """As in Qwen3-32B-FP8-Static-PerTensor."""
    fields = {
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
        "ignore": ["lm_head"],
        "quant_algo": "FP8",
        "kv_cache_scheme": "FP8",
        "producer": {"name": "modelopt", "version": "0.31.0"},
    }
    found = QuantScheme.of({"quantization_config": fields})
    assert found is not None and found.method == "modelopt"
    assert found.format_of("model.layers.0.mlp.up_proj.weight") == Float8(None)
    assert found.format_of("lm_head.weight") is None
