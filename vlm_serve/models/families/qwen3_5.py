"""Qwen3.5 and Qwen3.5-MoE: three Gated DeltaNet layers to one of gated attention."""

from __future__ import annotations

import math
from collections.abc import Callable

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config
from vlm_serve.models.parts.attention import Attention
from vlm_serve.models.parts.base import FeedForward, Mixer, Norm, Routing
from vlm_serve.models.parts.feed_forward import Experts, Mlp
from vlm_serve.models.parts.gated_delta import GatedDelta
from vlm_serve.models.spec import LayerSpec, ModelSpec, Rope, VisionSpec
from vlm_serve.preprocess.family import QWEN3_5


def spec(config: Config) -> ModelSpec:
    """The model of a config.json, dense or MoE, with a vision tower or without."""
    kind = config.raw["model_type"]
    outer = not kind.endswith("_text")
    text = config.section("text_config") if outer else config
    text.expect("hidden_act", "silu")
    text.expect("attn_output_gate", True)
    kinds = _layer_types(text)
    mixers = {each: _MIXERS[each](text) for each in set(kinds)}
    feed_forward = _experts(text) if "moe" in kind else Mlp(text.size("intermediate_size"))
    # transformers reads the outer switch; older files carry only the inner one.
    tied = config.raw.get("tie_word_embeddings", text.value("tie_word_embeddings"))
    vision = config.section("vision_config") if config.raw.get("vision_config") else None
    return ModelSpec(
        hidden_size=text.size("hidden_size"),
        vocab_size=text.size("vocab_size"),
        max_position_embeddings=text.size("max_position_embeddings"),
        layers=tuple(LayerSpec(mixers[each], feed_forward) for each in kinds),
        norm=Norm(text.positive("rms_norm_eps")),
        rope=_rope(text),
        tied_embeddings=bool(tied),
        vision=None if vision is None else _vision(vision),
        dtype=config.dtype(text),
        family=QWEN3_5,
    )


def _layer_types(text: Config) -> list[str]:
    count = text.size("num_hidden_layers")
    if not text.raw.get("layer_types"):
        text.size("full_attention_interval")
    given = list(text.raw.get("layer_types") or text.value("layer_types"))
    unknown = sorted(set(given) - set(_MIXERS))
    if unknown:
        raise CheckpointError(f"layer type {unknown[0]!r} is not supported")
    if len(given) < count:
        raise CheckpointError(f"layer_types names {len(given)} layers of {count}")
    return given[:count]


def _gated_delta(text: Config) -> GatedDelta:
    sizes = GatedDelta(
        key_heads=text.size("linear_num_key_heads"),
        value_heads=text.size("linear_num_value_heads"),
        key_dim=text.size("linear_key_head_dim"),
        value_dim=text.size("linear_value_head_dim"),
        taps=text.size("linear_conv_kernel_dim"),
    )
    _check_groups("linear_num_value_heads", sizes.value_heads, sizes.key_heads)
    return sizes


def _attention(text: Config) -> Attention:
    sizes = Attention(
        heads=text.size("num_attention_heads"),
        kv_heads=text.size("num_key_value_heads"),
        head_dim=text.size("head_dim"),
        bias=bool(text.value("attention_bias")),
    )
    _check_groups("num_attention_heads", sizes.heads, sizes.kv_heads)
    return sizes


_MIXERS: dict[str, Callable[[Config], Mixer]] = {
    "linear_attention": _gated_delta,
    "full_attention": _attention,
}


def _check_groups(name: str, heads: int, key_heads: int) -> None:
    if heads % key_heads:
        raise CheckpointError(f"{name} {heads} is no multiple of its {key_heads} key heads")


def _experts(text: Config) -> FeedForward:
    routing = Routing(text.size("num_experts"), text.size("num_experts_per_tok"))
    if routing.top_k > routing.num_experts:
        raise CheckpointError(
            f"num_experts_per_tok {routing.top_k} exceeds {routing.num_experts} experts"
        )
    shared = text.size("shared_expert_intermediate_size")
    return Experts(routing, text.size("moe_intermediate_size"), shared)


def _rope(text: Config) -> Rope:
    rope = text.inlined("rope_parameters", "rope_scaling")
    kind = rope.raw.get("rope_type", rope.raw.get("type"))
    if kind not in ("default", None):
        raise CheckpointError(f"rope_type {kind!r} is not supported, only 'default'")
    if not rope.raw.get("mrope_interleaved", True):
        raise CheckpointError("mrope_interleaved False is not supported, only True")
    rotary_dim = int(text.size("head_dim") * rope.positive("partial_rotary_factor"))
    sections = tuple(rope.given("mrope_section"))
    if len(sections) != 3 or rotary_dim % 2 or not 0 < rotary_dim <= text.size("head_dim"):
        raise CheckpointError(f"mrope_section {list(sections)} does not fit {rotary_dim} dims")
    return Rope(rope.positive("rope_theta"), rotary_dim, (sections[0], sections[1], sections[2]))


def _vision(config: Config) -> VisionSpec:
    config.expect("hidden_act", "gelu_pytorch_tanh")
    if config.raw.get("deepstack_visual_indexes"):
        raise CheckpointError("deepstack vision features are not supported")
    # No published file has it: transformers' value is the model's.
    rope = config.value("rope_parameters")
    if rope["rope_type"] != "axial":
        raise CheckpointError(f"rope_type {rope['rope_type']!r} is not supported, only 'axial'")
    sizes = VisionSpec(
        depth=config.size("depth"),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        heads=config.size("num_heads"),
        in_channels=config.size("in_channels"),
        patch_size=config.size("patch_size"),
        temporal_patch_size=config.size("temporal_patch_size"),
        merge_size=config.size("spatial_merge_size"),
        out_hidden_size=config.size("out_hidden_size"),
        num_positions=config.size("num_position_embeddings"),
        rope_theta=float(rope["rope_theta"]),
    )
    if not (math.isfinite(sizes.rope_theta) and sizes.rope_theta > 0):
        raise CheckpointError(f"the vision rope_theta must be positive, not {sizes.rope_theta}")
    if sizes.hidden_size % (4 * sizes.heads):
        raise CheckpointError("the vision hidden_size must be a multiple of 4 * num_heads")
    return sizes
