"""What a config.json leaves to transformers' classes is taken as they have it, if the tensors do
not contradict it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from safetensors.torch import load_file, save_file

from vlm_serve.errors import CheckpointError
from vlm_serve.models import load_model
from vlm_serve.models.config import Config, mismatch
from vlm_serve.models.families import (
    granitemoehybrid,
    internvl,
    lfm2,
    lfm2_moe,
    lfm2_vl,
    minicpmv,
    nemotron_h,
    qwen2,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_next,
    qwen3_vl,
)
from vlm_serve.models.registry import FAMILIES, read_spec, spec_of
from vlm_serve.models.vision_windows import WindowVisionSpec

TABLES = {
    source: table
    for family in (
        *(qwen3_5, qwen3_vl, qwen3_next, qwen3, qwen2, qwen2_vl),
        *(minicpmv, lfm2, lfm2_moe, lfm2_vl, internvl, granitemoehybrid, nemotron_h),
    )
    for source, table in family.DEFAULTS.items()
}
WHOLE = (
    "Qwen3_5Config",
    "Qwen3_5MoeConfig",
    "Qwen3_5TextConfig",
    "Qwen3_5MoeTextConfig",
    "Qwen3VLConfig",
    "Qwen3VLMoeConfig",
    "Qwen3OmniMoeThinkerConfig",
    "Qwen3NextConfig",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "Qwen2Config",
    "Qwen2VLConfig",
    "Qwen2_5_VLConfig",
    "MiniCPMV4_6Config",
    "MiniCPMV4_7Config",
    "MiniCPMOcrConfig",
    "Lfm2Config",
    "Lfm2MoeConfig",
    "Lfm2VlConfig",
    "InternVLConfig",
    "GraniteMoeHybridConfig",
    "NemotronHConfig",
)
ROPE = ("rope_theta", "partial_rotary_factor")
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3MoeConfig": {"norm_topk_prob": True},
    "Qwen3OmniMoeThinkerConfig": {"text_config": {"hidden_size": 3584}},
}
"""Fields of every published file whose defaults are refused."""


def transformers_class(name: str) -> Any:
    oracle.prepare_models()
    import transformers

    return getattr(transformers, name, None) or pytest.skip(f"this transformers has no {name}")


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """Its classes say at length which sections they make."""
    from transformers.utils import logging as told

    before = told.get_verbosity()
    told.set_verbosity_error()
    yield
    told.set_verbosity(before)


@pytest.mark.parametrize("source", TABLES)
def test_tables_are_what_transformers_has(source: str) -> None:
    kind = transformers_class(source)
    made = kind()
    for name, value in TABLES[source].items():
        if callable(value):
            value = value(Config(json.loads(made.to_json_string()), source))
        if name == "mrope_section":
            module = __import__(
                kind.__module__.replace("configuration", "modeling"), fromlist=["x"]
            )
            ends = ("Config", ""), ("TextConfig", "ThinkerText"), ("TextConfig", "")
            names = [source.replace(*end) for end in ends]
            rotations = (getattr(module, f"{each}RotaryEmbedding", None) for each in names)
            found = next(filter(None, rotations))(made).mrope_section
        elif name == "full_attention_interval":
            found = made.layer_types.index("full_attention") + 1
        elif name in ROPE:
            found = made.rope_parameters[name]
        elif name == "head_dim" and (
            "Qwen2" in source or "Omni" in source
        ):  # computed by the models' attention
            found = made.hidden_size // made.num_attention_heads
        elif name == "head_dim" and not hasattr(made, name):
            import transformers

            small: dict[str, Any] = {"num_hidden_layers": 1, "num_experts": 1, "vocab_size": 8}
            small["layer_types"] = ["full_attention"]
            with torch.device("meta"):
                built = getattr(transformers, source.replace("Config", "Model"))(kind(**small))
            found = built.layers[0].self_attn.head_dim
        else:
            found = getattr(made, name, False)
        assert (list(found) if isinstance(found, list | tuple) else found) == (
            list(value) if isinstance(value, tuple) else value
        ), name


def saved(name: str, *, diff: bool = True) -> dict[str, Any]:
    """What transformers writes for a configuration of defaults, with a tower that fits."""
    made = transformers_class(name)(**PUBLISHED.get(name, {}))
    if hasattr(getattr(made, "vision_config", None), "out_hidden_size"):
        made.vision_config.out_hidden_size = made.text_config.hidden_size
    if hasattr(getattr(made, "vision_config", None), "embed_dim"):
        made.vision_config.hidden_size = made.text_config.hidden_size
    written: dict[str, Any] = json.loads(made.to_json_string(use_diff=diff))
    return written


@pytest.mark.parametrize("name", WHOLE)
def test_what_transformers_writes_is_read(name: str, tmp_path: Path) -> None:
    whole, diff = spec_of(saved(name, diff=False)), spec_of(saved(name))
    assert whole == diff
    (tmp_path / "config.json").write_text(json.dumps(saved(name)))
    made = transformers_class("AutoConfig").from_pretrained(str(tmp_path))
    made.save_pretrained(tmp_path / "again")
    assert read_spec(tmp_path / "again" / "config.json") == whole


@pytest.mark.parametrize("name", WHOLE)
def test_a_field_that_is_left_out_is_what_its_class_has(name: str) -> None:
    raw = saved(name)
    expected = spec_of(raw)
    published = PUBLISHED.get(name, {})
    published = published.get("text_config", published)
    names: tuple[str, ...] = ("text_config", "vision_config")
    sections = [each for each in names if each in raw] or [""]
    for section in sections:
        for field in raw[section] if section else raw:
            changed = deepcopy(raw)
            part = changed[section] if section else changed
            if field in ("model_type", "out_hidden_size", *published):
                continue
            if field == "hidden_size" and "embed_dim" in part:  # that of the language model
                continue
            del part[field]
            assert spec_of(changed) == expected, field
            if (
                field in ("layer_types", "rope_parameters")
                or ("Qwen3VLMoe" in name or "Omni" in name)
                and field == "head_dim"
            ):
                part[field] = None
                assert spec_of(changed) == expected, field
        rotation = (raw[section] if section else raw).get("rope_parameters", {})
        for field in rotation:
            if section == "vision_config":
                continue
            changed = deepcopy(raw)
            part = changed[section] if section else changed
            del part["rope_parameters"][field]
            assert spec_of(changed) == expected, field


@pytest.mark.parametrize("kind", FAMILIES)
def test_classes_are_named_as_transformers_names_them(kind: str) -> None:
    source = FAMILIES[kind].source
    whole = transformers_class(source)
    thinker = source == "Qwen3OmniMoeThinkerConfig"  # whose sections the family names itself
    assert whole.model_type == f"{kind}_thinker" if thinker else kind
    for name, section in () if thinker else whole.sub_configs.items():
        if section.__name__ != "AutoConfig":
            part = Config({name: {}}, source).section(name)
            assert part._source == section.__name__


def test_what_a_newer_class_would_say_stands_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiniCPM-V 4.7 is read with a transformers that does not know it yet."""
    spec = SPECS["minicpm on a canvas"]
    raw = json.loads((make_checkpoint(tmp_path, spec) / "config.json").read_text())
    raw["vision_config"] = {"model_type": "minicpmv4_7_vision", "num_channels": None}
    for name in ("downsample_mode", "insert_layer_id", "tie_word_embeddings"):
        raw.pop(name, None)
        raw["text_config"].pop(name, None)
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    monkeypatch.delitem(CONFIG_MAPPING._mapping, spec.family, raising=False)
    for name in ("MiniCPMV4_7Config", "MiniCPMV4_7VisionConfig"):
        monkeypatch.setattr(transformers, name, None, raising=False)
    found = spec_of(raw)
    assert found.vision == WindowVisionSpec(
        depth=12,
        hidden_size=768,
        intermediate_size=3072,
        heads=12,
        in_channels=3,
        patch_size=16,
        side=14,
        merged_layer=6,
        merge_size=4,
        out_hidden_size=64,
    )
    assert not found.tied_embeddings


def test_fields_that_were_left_out_are_noted() -> None:
    raw = saved("Qwen3VLMoeConfig")
    del raw["text_config"]["head_dim"], raw["vision_config"]["depth"]
    assert spec_of(raw).defaulted == {
        "text_config.head_dim": "Qwen3VLMoeTextConfig",
        "text_config.mrope_section": "Qwen3VLMoeTextConfig",
        "vision_config.depth": "Qwen3VLMoeVisionConfig",
    }
    assert spec_of(raw).layers[0].mixers[0].heads_to_split() == {"attention heads": 16}


def test_sections_are_no_defaults() -> None:
    for section in ("text_config", "vision_config"):
        raw = saved("Qwen3VLConfig")
        del raw[section]
        with pytest.raises(CheckpointError, match=f"lacks {section}"):
            spec_of(raw)


def changed_config(path: Path, change: Any) -> None:
    raw = json.loads((path / "config.json").read_text())
    change(raw)
    (path / "config.json").write_text(json.dumps(raw))


CONTRADICTED = [
    ("dense", "text_config", "hidden_size", "out_hidden_size 64 .* hidden_size 4096"),
    (
        "dense",
        "text_config",
        "vocab_size",
        r"embed_tokens.* has shape \[\d+, 64\].* \[248320, 64\].*vocab",
    ),
    (
        "dense",
        "text_config",
        "head_dim",
        r"q_proj.* has shape \[256, 64\].* \[2048, 64\].* head_dim",
    ),
    (
        "dense",
        "text_config",
        "num_key_value_heads",
        r"k_proj.* has shape \[64, 64\].*\[128, 64\].*_key_",
    ),
    (
        "dense",
        "text_config",
        "intermediate_size",
        r"\[128, 64\], .*\[12288, 64\] by intermediate_size",
    ),
    (
        "dense",
        "text_config",
        "linear_key_head_dim",
        r"conv1d.*\[128, 1, 4\].*\[576, 1, 4\] by .*linear_key_head_dim",
    ),
    (
        "dense",
        "text_config",
        "num_hidden_layers",
        r"tensors of 4 layers .*num_hidden_layers.* is 32",
    ),
    ("dense", "vision_config", "depth", r"tensors of 2 layers .*vision_config.depth.* is 27"),
    ("dense", "vision_config", "patch_size", r"patch_embed.* by patch_size"),
    ("dense", "vision_config", "num_position_embeddings", r"\[2304, 32\] by num_position"),
    ("text", "", "num_hidden_layers", r"tensors of 4 layers .*num_hidden_layers.* is 32"),
    ("text", "", "linear_value_head_dim", r"conv1d.* by .*linear_value_head_dim"),
    ("next", "", "num_experts", r"gate.weight has shape \[8, 64\].*\[512, 64\] by num_experts"),
    ("next", "", "moe_intermediate_size", r"\[\d+, 64\].*\[512, 64\] by moe_intermediate_size"),
    ("next", "", "shared_expert_intermediate_size", r"by shared_expert_intermediate_size"),
    ("qwen3", "", "head_dim", r"\[128, 64\].*\[512, 64\] by num_attention_heads, head_dim"),
    ("qwen3 moe", "", "num_experts", r"gate.weight has shape \[8, 64\].*by num_experts"),
    ("vl", "text_config", "head_dim", r"\[128, 64\].*\[512, 64\] by num_attention_heads, head_dim"),
    ("vl moe", "text_config", "num_experts", r"gate.weight has shape \[8, 64\].*by num_experts"),
    ("minicpm", "vision_config", "num_hidden_layers", r"tensors of 3 layers .* is 12"),
]


@pytest.mark.parametrize(("name", "section", "field", "complaint"), CONTRADICTED)
def test_a_default_that_the_tensors_contradict_is_named(
    tmp_path: Path, name: str, section: str, field: str, complaint: str
) -> None:
    path = make_checkpoint(tmp_path, SPECS[name])

    def leave_out(raw: dict[str, Any]) -> None:
        del (raw[section] if section else raw)[field]

    changed_config(path, leave_out)
    with pytest.raises(CheckpointError, match=complaint):
        load_model(path, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("dense", r"q_proj.* \[128, 64\].* \[256, 64\] by num_attention_heads, .*attn_output_gate"),
        ("text, moe", r"q_proj.* \[128, 64\].* \[256, 64\] by .*attn_output_gate"),
        ("next", r"q_proj.* \[128, 64\].* \[256, 64\] by .*attn_output_gate"),
        ("vl", r"q_proj.* \[256, 64\].* \[128, 64\] by .*attn_output_gate"),
        ("qwen3", r"q_proj.* \[256, 64\].* \[128, 64\] by .*attn_output_gate"),
    ],
)
def test_the_rows_of_queries_tell_whether_there_is_a_gate(
    tmp_path: Path, name: str, complaint: str
) -> None:
    path = make_checkpoint(tmp_path, SPECS[name])
    changed_config(path, lambda raw: raw.get("text_config", raw).pop("attn_output_gate", None))
    plain = name in ("vl", "qwen3")
    if not plain:
        load_model(path, torch.float32, "cpu")
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for each in [each for each in tensors if each.endswith("self_attn.q_proj.weight")]:
            rows = tensors[each]
            half = len(rows) // 2
            tensors[each] = torch.cat([rows, rows]) if plain else rows[:half].clone()
        save_file(tensors, file)
    with pytest.raises(CheckpointError, match=complaint):
        load_model(path, torch.float32, "cpu")


def test_loading_says_what_was_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path, SPECS["vl"])
    changed_config(path, lambda raw: raw["text_config"]["rope_scaling"].pop("mrope_section"))
    with caplog.at_level(logging.INFO, logger="vlm_serve"):
        load_model(path, torch.float32, "cpu")
    assert "text_config.mrope_section to transformers' Qwen3VLTextConfig" in caplog.text


def test_quantised_tensors_name_the_fields_of_their_weight() -> None:
    dense = mismatch("model.layers.0.self_attn.q_proj.weight", [64, 32], [128, 32])
    assert dense.endswith("by num_attention_heads, head_dim, attn_output_gate")
    packed = mismatch("model.layers.0.self_attn.q_proj.qweight", [4, 64], [4, 128], [8, 128])
    assert "implies [4, 128] or [8, 128] by num_attention_heads" in packed
    assert packed.endswith("hidden_size")
    assert (
        mismatch("other.weight", [1], [2]) == "other.weight has shape [1], the config implies [2]"
    )


@pytest.mark.parametrize(
    ("name", "actual", "wanted", "field"),
    [
        ("mixer.conv1d.weight", [96, 1, 4], [96, 1, 3], "mamba_d_conv, conv_kernel"),
        (
            "block_sparse_moe.experts.gate_up_proj",
            [4, 64, 64],
            [4, 22016, 64],
            "intermediate_size, hidden_size",
        ),
        ("block_sparse_moe.router.layer.weight", [4, 64], [8, 64], "num_local_experts"),
        ("mixer.gate.weight", [4, 64], [8, 64], "n_routed_experts"),
        (
            "mixer.shared_experts.up_proj.weight",
            [64, 32],
            [7688, 32],
            "moe_shared_expert_intermediate_size",
        ),
    ],
)
def test_tensors_of_mamba_families_name_their_fields(
    name: str, actual: list[int], wanted: list[int], field: str
) -> None:
    assert mismatch(f"model.layers.0.{name}", actual, wanted).endswith(f" by {field}")
