"""Every field of every config is changed, one by one: another model, a refusal, or the same model
where the field is listed as deciding nothing. None is passed over in silence."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import oracle
import pytest
from checkpoint_config import full_config, text_config
from families import FAMILIES as SHAPES
from quantised_configs import AUTO_ROUND, AWQ, FP8, GPTQ, MODELOPT, MODELOPT_MIXED, PACKED, scheme
from quantised_weights import FORMATS

from vlm_serve.errors import CheckpointError
from vlm_serve.models.registry import FAMILIES, spec_of

Path_ = tuple[str | int, ...]

HARMLESS = {
    "transformers' own bookkeeping": """_name_or_path transformers_version architectures
        is_encoder_decoder output_attentions output_hidden_states return_dict use_cache
        chunk_size_feed_forward""",
    "training": r"\w+_dropout(_prob)? initializer_range router_aux_loss_coef output_router_logits",
    "classifiers, which `architectures` names": r"id2label\.\d+ label2id\.\w+ problem_type",
    "read by `preprocess`": r"""\w+_token_id (image|slice)_(start|end)_id newline_id
        tokens_per_second position_id_per_seconds""",
    "the processor decides": "image_seq_length",
    "of hearing and speaking": r"audio_config\..* enable_audio_output",
    "a section's own dtype of a tower": "dtype",
    "read by no class of transformers": "mamba_ssm_dtype",
    "`layer_types` decides": "full_attention_interval full_attn_idxs",
    "`rope_scaling` or `rope_parameters` decides, as in transformers": (
        r"rope_theta partial_rotary_factor rope_scaling rope_parameters\.\w+"
    ),
    "the outer one decides": (
        "tie_word_embeddings tie_embedding insert_layer_id patch_size image_size"
    ),
    "all layers have experts": "intermediate_size mlp_only_layers num_local_experts",
    "beginnings of training": "layer_scale_init_value use_mask_token",
    "a head of the tower that no language model reads": "vision_use_head",
    "`block_auto_adjust_ff_dim` is false": "block_ffn_dim_multiplier block_multiple_of",
    "chunks of a class's own computation": "mamba_chunk_size chunk_size",
    "the type of states is an option, and all mixers compute in float32": "mamba_ssm_cache_dtype",
    "no class of transformers reads them, or only to initialise": """expand mamba_proj_bias
        n_shared_experts moe_shared_expert_overlap num_logits_to_keep use_mamba_kernels
        hidden_dropout rescale_prenorm_residual time_step_(max|limit|floor)""",
    "layers that draft, which are left unread": r"num_nextn_predict_layers mtp_\w+",
    "a list of layers decides": """num_hidden_layers layers_block_type
        layer_types hybrid_override_pattern""",
    "`mamba_d_head` decides": "mamba_expand",
    "`use_sliding_window` is false": "sliding_window max_window_layers",
}
"""Ends of paths, by reason."""

STORED = {
    "empty means absent": r".*=''",
    "absent means the usual value": r".*=None",
    "what is wanted of activations, keys and values": (
        r"(config_groups\.\w+\.(input|output)_activations|kv_cache_scheme)\..*"
    ),
    "each group has its own": "format=.*",
    "nothing in them is read": r"dynamic\.-:.*",
    "bits of 16 and more are plain numbers": r"extra_config\.lm_head\..*",
    "who wrote the file": r"(producer|lm_head|zero_point).*",
    "`quant_algo` decides, and tensors show it": (
        r"modelopt config_groups\.group_0\.(weights\.\w+|targets)=.*"
    ),
}
"""Changes of quantization_config that make the same scheme, by reason: `path=value`, some with the
method's name before it."""


def leaves(content: Any, place: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    pairs = content.items() if isinstance(content, Mapping) else enumerate(content)
    for name, value in pairs:
        nested = (
            isinstance(value, dict) or isinstance(value, list) and value and type(value[0]) is dict
        )
        if nested and value:
            yield from leaves(value, (*place, name))
        else:
            yield (*place, name), value


def others(value: Any) -> list[Any]:
    """Other values of the same type, and of others in place of none."""
    found: list[Any] = [1, True, "another", {"a": 1}, [1]]
    if isinstance(value, bool):
        found = [not value, None]
    elif isinstance(value, int):
        found = [value + 1, 2 * value, value // 2, 0, -1]
    elif isinstance(value, float):
        found = [2 * value + 0.1, -1.0, 0.0]
    elif isinstance(value, str):
        found = ["another", "", "linear"]
    elif isinstance(value, list):
        found = [value[:-1], [*value, "re:.*up_proj"], []]
    return [other for other in found if other != value or type(other) is not type(value)]


def changed(config: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    result: Any = copy.deepcopy(config)
    inner = result
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return dict(result)


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(first)
    for name, value in second.items():
        inner = both.get(name)
        nested = isinstance(value, dict) and isinstance(inner, dict)
        both[name] = merged(inner, value) if nested and inner else value
    return both


def everything(kind: str) -> dict[str, Any]:
    """A config.json with all fields of transformers' class."""
    oracle.prepare_models()
    import transformers

    spec = next(iter(SHAPES[kind].values()))
    made = full_config(spec, text_config(spec)) if spec.vision_depth else text_config(spec)
    whole = getattr(transformers, FAMILIES[kind].source, None)
    if whole is None:
        pytest.skip(f"this transformers has no {FAMILIES[kind].source}")
    own = {name: each for name, each in made.items() if name not in ("model_type", "architectures")}
    written = json.loads(whole(**own).to_json_string(use_diff=False))
    if spec.older and spec.vision_depth:  # It nests what published files do not.
        made = {name: each for name, each in made.items() if name in written}
    return merged(written, made)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", FAMILIES)
def test_fields_of_models(kind: str) -> None:
    config = everything(kind)
    ends = "|".join(end for ends in HARMLESS.values() for end in ends.split())
    harmless = re.compile(rf"(.*\.)?({ends})")
    plain = replace(spec_of(config), config={}, defaulted={})
    for path, value in leaves(config):
        name = ".".join(map(str, path))
        # Null leaves a field to its class (test_config_defaults.py).
        for other in (each for each in others(value) if each is not None):
            try:
                found = spec_of(changed(config, path, other))
            except CheckpointError:
                continue
            same = replace(found, config={}, defaulted={}) == plain
            assert not same or harmless.fullmatch(name), f"{name} {other!r} changes nothing"


QUANTISED: dict[str, dict[str, Any]] = {
    **{name: each.config(["a", "b"], 32) for name, each in FORMATS.items() if not each.algorithm},
    "published fp8": FP8,
    "published gptq": GPTQ,
    "published awq": AWQ,
    "published int4": PACKED,
    "published modelopt": MODELOPT,
    "published mixed modelopt": MODELOPT_MIXED,
    "auto-round": AUTO_ROUND,
}


@pytest.mark.parametrize("name", QUANTISED)
def test_fields_of_formats(name: str) -> None:
    config = QUANTISED[name]
    harmless = re.compile("|".join(f"(?:{each})" for each in STORED.values()))
    plain, method = scheme(config), config["quant_method"]
    for path, value in leaves(config):
        place = ".".join(map(str, path))
        for other in others(value):
            try:
                same = scheme(changed(config, path, other)) == plain
            except CheckpointError:
                continue
            said = f"{place}={other!r}"
            known = harmless.fullmatch(said) or harmless.fullmatch(f"{method} {said}")
            assert not same or known, f"{said} changes nothing"
