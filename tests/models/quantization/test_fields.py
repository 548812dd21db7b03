"""Every field of a quantisation configuration is read, passed over for a stated reason, or refused
by name."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import quantised_oracles
from quantised_configs import AUTO_ROUND, AWQ, CHANNEL, FP8, GPTQ, INT4, PACKED, scheme
from quantised_configs import MODELOPT as WHOLE
from quantised_configs import MODELOPT_MIXED as MIXED

from vlm_serve.errors import CheckpointError
from vlm_serve.models.quantization.fields import PASSED_OVER, REFUSED
from vlm_serve.models.quantization.scheme import QuantScheme

DOCS = Path(__file__).parents[3] / "docs" / "quantization.md"
GROUP = ["config_groups", "group_0"]
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
TRANSFORM = {
    "type": "hadamard",
    "apply": [{"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": True}],
}
COMPRESSED = PACKED | {
    "quantization_status": "compressed",
    "kv_cache_scheme": ACTIVATIONS,
    "sparsity_config": {"format": "dense"},
    "transform_config": {"config_groups": {"R4": TRANSFORM}},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INT4,
            "input_activations": ACTIVATIONS,
            "output_activations": ACTIVATIONS,
        }
    },
}
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
MODELOPT = WHOLE | {
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": NVFP4, "input_activations": {**NVFP4}}
    }
}
OLDER = {
    "quant_method": "modelopt",
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}
PATTERN = r"+:.*\.0\.mlp.*"
TRANSFORMS = ["transform_config", "config_groups", "R4"]
LAYER = next(iter(MIXED["quantized_layers"]))
PLACES: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("fp8", FP8, []),
    ("gptq", GPTQ, []),
    ("gptq", GPTQ | {"dynamic": {PATTERN: {"bits": 8}}}, ["dynamic", PATTERN]),
    ("awq", AWQ, []),
    ("auto-round", AUTO_ROUND, []),
    ("auto-round", AUTO_ROUND, ["extra_config", "mlp.up_proj"]),
    ("auto-round", AUTO_ROUND, ["extra_config", "lm_head"]),
    ("auto-round", AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, []),
    ("compressed-tensors", COMPRESSED, []),
    ("compressed-tensors: config_groups", COMPRESSED, GROUP),
    ("compressed-tensors: weights", COMPRESSED, [*GROUP, "weights"]),
    ("activations", COMPRESSED, [*GROUP, "input_activations"]),
    ("activations", COMPRESSED, [*GROUP, "output_activations"]),
    ("activations", COMPRESSED, ["kv_cache_scheme"]),
    ("compressed-tensors: sparsity_config", COMPRESSED, ["sparsity_config"]),
    ("compressed-tensors: transform_config", COMPRESSED, ["transform_config"]),
    ("compressed-tensors: transform_config.config_groups", COMPRESSED, TRANSFORMS),
    (
        "compressed-tensors: transform_config.config_groups.apply",
        COMPRESSED,
        [*TRANSFORMS, "apply", 0],
    ),
    ("modelopt", MODELOPT, []),
    ("modelopt", OLDER, []),
    ("modelopt", OLDER, ["quantization"]),
    ("modelopt: config_groups", MODELOPT, GROUP),
    ("modelopt: weights", MODELOPT, [*GROUP, "weights"]),
    ("activations", MODELOPT, [*GROUP, "input_activations"]),
    ("modelopt: quantized_layers", MIXED, ["quantized_layers", LAYER]),
    ("gguf", {"quant_method": "gguf", "types": {"Q4_0": ["a.weight"]}}, []),
]
"""Section, a configuration that has it, and the path to it."""


def changed(fields: dict[str, Any], path: list[Any], **changes: Any) -> dict[str, Any]:
    """Return a configuration with changes in the object at a path."""
    result = copy.deepcopy(fields)
    section = result
    for step in path:
        section = section[step]
    section.update(changes)
    return result


def test_every_section_has_an_example() -> None:
    assert {section for section, *_ in PLACES} == set(PASSED_OVER)


@pytest.mark.parametrize(("section", "fields", "path"), PLACES)
def test_an_unknown_field_is_refused_by_name(section: str, fields: Any, path: list[Any]) -> None:
    scheme(fields)
    for value in (3, 0, 0.5, True, "asymmetric", [1], {"a": None}):
        with pytest.raises(CheckpointError, match=f"scale_offset {re.escape(repr(value))} in "):
            scheme(changed(fields, path, scale_offset=value))
    with pytest.raises(CheckpointError, match="it may change what the weights mean; serve the"):
        scheme(changed(fields, path, scale_offset=1))


@pytest.mark.parametrize(("section", "fields", "path"), PLACES)
def test_an_unknown_field_that_asks_for_nothing_may_stay(
    section: str, fields: Any, path: list[Any]
) -> None:
    nothing: tuple[Any, ...] = (None, False, "", [], {})
    for value in nothing:
        assert scheme(changed(fields, path, scale_offset=value)) == scheme(fields)


@pytest.mark.parametrize(("section", "fields", "path"), PLACES)
def test_what_is_passed_over_changes_nothing(section: str, fields: Any, path: list[Any]) -> None:
    for name in PASSED_OVER[section]:
        for value in (7, "another", {"a": 1}):
            assert scheme(changed(fields, path, **{name: value})) == scheme(fields), name


@pytest.mark.parametrize(("section", "fields", "path"), PLACES)
def test_fields_of_known_meaning_are_refused_with_it(
    section: str, fields: Any, path: list[Any]
) -> None:
    for name, reason in REFUSED.items():
        if name in (*PASSED_OVER[section], "transform_config") or path[-1:] == ["lm_head"]:
            continue
        with pytest.raises(CheckpointError, match=rf"{name} 4 in .* not supported: {reason}"):
            scheme(changed(fields, path, **{name: 4}))


@pytest.mark.parametrize("location", ["input", "output", "q_attn", "k_cache", "weights", None])
def test_a_transform_of_activations_is_refused(location: Any) -> None:
    """As in the files of SpinQuant and QuIP with a rotation that is applied while serving."""
    applied = [*TRANSFORM["apply"], {"targets": ["re:.*down_proj$"], "location": location}]
    fields = changed(COMPRESSED, TRANSFORMS, apply=applied)
    complaint = rf"location {location!r} in apply\[1\] of R4 .* a transform of activations"
    with pytest.raises(CheckpointError, match=complaint):
        scheme(fields)


@pytest.mark.parametrize("locations", [["weight_input"], ["weight_input", "weight_output"], []])
def test_transforms_of_weights_are_in_the_weights(locations: list[str]) -> None:
    applied = [{"targets": ["Linear"], "location": each} for each in locations]
    fields = changed(COMPRESSED, TRANSFORMS, apply=applied)
    assert scheme(fields).rules == scheme(PACKED).rules


@pytest.mark.parametrize("transforms", [{"config_groups": 4}, {"config_groups": {"R4": [1]}}, [1]])
def test_transforms_of_another_form_are_refused(transforms: Any) -> None:
    with pytest.raises(CheckpointError, match="transform_config of quantization_config"):
        scheme(COMPRESSED | {"transform_config": transforms})


def weights(**changes: Any) -> dict[str, Any]:
    return changed(COMPRESSED, [*GROUP, "weights"], **changes)


def float8(**changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": "float-quantized", "weights": CHANNEL | changes}
    return PACKED | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (weights(dynamic=True), "dynamic True in weights of group_0"),
        (weights(strategy="channel"), "group_size 128 in weights of group_0"),
        (weights(block_structure=[128, 128]), "block_structure .128, 128. in weights of group_0"),
        (float8(group_size=128), "group_size 128 in weights of group_0"),
        (float8(block_structure=[128, 128]), "block_structure"),
        (float8(actorder="group"), "actorder 'group'"),
        (COMPRESSED | {"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config .* exper"),
        (changed(COMPRESSED, ["sparsity_config"], format="sparse-24-bitmask"), "sparse-24-bitmask"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        (GPTQ | {"format": "gptq_v2", "checkpoint_format": "gptq"}, "contradict each other"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (GPTQ | {"desc_act": 1}, "desc_act in quantization_config must be true or false"),
        (GPTQ | {"data_type": "fp"}, "data_type 'fp'"),
        (GPTQ | {"dynamic": {PATTERN: {"checkpoint_format": "gptq_v2"}}}, "checkpoint_format 'gpt"),
        (AWQ | {"w_bit": 8}, "bits 4 and w_bit 8 in quantization_config contradict"),
        (AWQ | {"q_group_size": 64}, "group_size 128 and q_group_size 64 .* contradict"),
        (AWQ | {"version": None, "format": "gemv"}, "format 'gemv'"),
        (AWQ | {"format": "gemv_fast"}, "version 'gemm' and format 'gemv_fast' .* contradict"),
        (AWQ | {"backend": "llm-awq"}, "backend 'llm-awq'"),
        (AWQ | {"desc_act": True}, "desc_act True in quantization_config"),
        (
            {**AUTO_ROUND, "packing_format": None, "backend": "autoround:exllamav2"},
            "packing_format 'auto_round:exllamav2'",
        ),
        (changed(AUTO_ROUND, ["extra_config", "mlp.up_proj"], data_type="fp"), "data_type 'fp'"),
        (changed(MODELOPT, GROUP, lora_rank=32), "lora_rank 32 in group_0"),
        (changed(OLDER, ["quantization"], pre_quant_scale=True), "pre_quant_scale True in"),
    ],
)
def test_a_value_that_is_not_followed_is_refused(fields: Any, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        scheme(fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (COMPRESSED, "static input_scale, in FP8; outputs in FP8; 8-bit keys and values"),
        (changed(COMPRESSED, ["kv_cache_scheme"], num_bits=4), "4-bit keys and values"),
        (FP8 | {"kv_cache_scheme": "static"}, "dynamic, in FP8; 8-bit keys and values"),
        (AUTO_ROUND | {"act_bits": 8, "act_data_type": "fp"}, "in 8 bits, fp"),
        (AUTO_ROUND | {"static_kv_dtype": "fp8"}, "8-bit keys and values"),
        (GPTQ | {"act_bits": 16}, "made for activations as they are"),
        (OLDER | {"quantization": {"kv_cache_quant_algo": "FP8"}}, "8-bit keys and values"),
    ],
)
def test_what_is_wanted_of_activations_is_reported(fields: Any, said: str) -> None:
    assert said in str(scheme(fields))


def test_both_lists_of_dense_modules_are_read() -> None:
    for fields, names in (
        (FP8, ("modules_to_not_convert", "ignored_layers")),
        (WHOLE, ("exclude_modules", "ignore")),
    ):
        both = scheme(fields | {names[0]: ["mlp.up_proj"], names[1]: ["mlp.down_proj"]})
        for module, dense in (("up_proj", True), ("down_proj", True), ("gate_proj", False)):
            assert (both.format_of(f"model.layers.0.mlp.{module}.weight") is None) is dense


def test_eight_bit_integers_may_be_stored_as_they_are() -> None:
    fields = weights(num_bits=8)
    expected = scheme(fields | {"format": "int-quantized"})
    assert scheme(fields | {"format": "naive-quantized"}) == expected


@pytest.mark.parametrize("fields", [{"group_size": 64, "bits": 4}, {"bits": 4, "mode": "mxfp4"}])
def test_mlx_is_named(fields: dict[str, Any]) -> None:
    for place in ("quantization", "quantization_config"):
        with pytest.raises(CheckpointError, match=f"quant_method None in {place} .* are MLX's"):
            QuantScheme.of({place: fields})


@pytest.mark.parametrize(
    "name", ["GPTQConfig", "AwqConfig", "FineGrainedFP8Config", "AutoRoundConfig"]
)
def test_what_transformers_writes_is_read(name: str) -> None:
    from transformers.utils import quantization_config

    kind = getattr(quantization_config, name)
    written = (kind(bits=4) if name == "GPTQConfig" else kind()).to_dict()
    assert scheme(json.loads(json.dumps(written)))


@pytest.mark.parametrize("writer", ["plain", "everything"])
def test_what_compressed_tensors_writes_is_read(writer: str) -> None:
    """With the defaults of its classes, and with a value in every field that may have one."""
    known = quantised_oracles.compressed_tensors()
    full = writer == "everything"
    calibration = {"observer": "minmax", "observer_kwargs": {"averaging_constant": 0.1}}
    args = INT4 | ({"actorder": "weight", "zp_dtype": "torch.int8", **calibration} if full else {})
    group: dict[str, Any] = {"targets": ["Linear"], "weights": args}
    if full:
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        group |= {"input_activations": inputs | calibration, "format": "pack-quantized"}
        group |= {"output_activations": ACTIVATIONS | calibration}
    config = known.QuantizationConfig(
        config_groups={"group_0": group},
        format="pack-quantized",
        quantization_status="compressed",
        kv_cache_scheme=ACTIVATIONS if full else None,
        global_compression_ratio=1.9 if full else None,
    )
    written = config.model_dump(mode="json") | {"version": "0.20.0", "sparsity_config": {}}
    assert scheme(written | {"transform_config": {}}).rules[-1:] == scheme(PACKED).rules[-1:]


def rows() -> list[str]:
    """Return the documentation's table of fields that are passed over."""
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for section, fields in PASSED_OVER.items():
        for reason in dict.fromkeys(fields.values()):
            names = tuple(name for name, each in fields.items() if each == reason)
            together.setdefault((reason, names), []).append(section)
    return [
        f"| {', '.join(f'`{each}`' for each in sections)} "
        f"| {', '.join(f'`{each}`' for each in names)} | {reason} |"
        for (reason, names), sections in together.items()
    ]


def test_the_documentation_lists_what_is_passed_over() -> None:
    text = DOCS.read_text(encoding="utf-8")
    part = text.partition("## Fields that are passed over")[2].partition("\n## ")[0]
    found = [line for line in part.splitlines() if line.startswith("|")][2:]
    assert found == rows()
    for name in REFUSED:
        assert f"`{name}`" in part
