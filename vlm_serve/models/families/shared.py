"""Common readers for the config.json of several of Qwen's families."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import ROTATIONS, Config
from vlm_serve.models.parts.attention import QK_NORMS, Attention
from vlm_serve.models.parts.base import FeedForward, Mixer, Norm, Routing
from vlm_serve.models.parts.feed_forward import Experts, Mlp
from vlm_serve.models.parts.gated_delta import GatedDelta
from vlm_serve.models.spec import NORMS, LayerSpec, ModelSpec, Rope, Vision, Yarn, yarn_scale
from vlm_serve.models.vision import VisionSpec
from vlm_serve.preprocess.text.family import Family

VISION_DEFAULTS: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
"""Common defaults of Qwen3_5VisionConfig, Qwen3VLVisionConfig and their MoE twins."""


_OLDER, _NEWER = ROTATIONS
# Older writers call the plain rotation by the positions that it is for. A dynamic one is plain up
# to max_position_embeddings, which is the context here.
_KINDS = {"default": "default", "mrope": "default", "dynamic": "default", "yarn": "yarn"}


_BLOCKS = {
    **dict.fromkeys(("M", "mamba"), "linear_attention"),
    **dict.fromkeys(("*", "attention"), "full_attention"),
    **{"E": "moe", "-": "mlp"},
}
"""Letters and former names of kinds of layers."""


def text_section(config: Config, source: str = "") -> Config:
    """Return the language model's section of a config.json with a vision tower; `source`: as of
    `Config.section`."""
    text = config.section("text_config", source)
    text.allow("model_type", f"{config.raw['model_type']}_text")
    return text


def tied_embeddings(config: Config, text: Config) -> bool:
    """Return whether embeddings are tied. transformers reads the outer switch; older files have
    only the inner one."""
    for section in (config, text):
        if "tie_word_embeddings" in section.raw:
            return bool(section.raw["tie_word_embeddings"])
    return bool(config.value("tie_word_embeddings"))


def quotient_head_dim(text: Config) -> int:
    """Return the head size of a class without a default of its own."""
    return text.size("hidden_size") // text.size("num_attention_heads")


def layer_types(text: Config, known: Collection[str]) -> list[str]:
    """Return the kind of every layer's token mixer."""
    count = text.size("num_hidden_layers")
    given = text.raw.get("layer_types") or []
    if not isinstance(given, list) or not all(isinstance(kind, str) for kind in given):
        raise CheckpointError(f"layer_types in config.json must be a list of names, not {given!r}")
    if not given:
        interval = text.size("full_attention_interval")
        full = [(index + 1) % interval == 0 for index in range(count)]
        given = ["full_attention" if attends else "linear_attention" for attends in full]
    return _known_types("layer_types", given, known, count)


def block_types(text: Config, known: Collection[str], count: int | None = None) -> list[str]:
    """Return the kinds of all layers, or of the first `count`, as transformers calls them today,
    whether a file has a list or, as Nemotron-H's, a letter for each."""
    fields = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    name = next((field for field in fields if text.raw.get(field) is not None), fields[1])
    given = text.given(name)
    if not isinstance(given, list | str) or not all(isinstance(kind, str) for kind in given):
        raise CheckpointError(f"{name} in config.json must be a list of names, not {given!r}")
    kinds = [_BLOCKS.get(kind, kind) for kind in given]
    return _known_types(name, kinds, known, max(1, len(kinds)) if count is None else count)


def _known_types(name: str, given: list[str], known: Collection[str], count: int) -> list[str]:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise CheckpointError(
            f"{name} {unknown[0]!r} is not supported, only {', '.join(map(repr, known))}"
        )
    if len(given) < count:
        raise CheckpointError(f"{name} names {len(given)} layers of {count}")
    return given[:count]


def hybrid_mixers(text: Config, *, interleaved: bool = False) -> list[Mixer]:
    """Return the token mixers of layers of gated attention and Gated DeltaNet; `interleaved`: see
    `GatedDelta`."""
    text.expect("hidden_act", "silu")
    # transformers' classes have neither field: their attention is always gated, in saved files too.
    # Loading checks the rows of q_proj.
    text.allow("attn_output_gate", True)
    text.allow("output_gate_type", "swish", "silu")
    kinds = layer_types(text, ("linear_attention", "full_attention"))
    mixers: dict[str, Mixer] = {}
    if "linear_attention" in kinds:
        mixers["linear_attention"] = gated_delta(text, interleaved=interleaved)
    if "full_attention" in kinds:
        mixers["full_attention"] = attention(text, gated=True)
    return [mixers[kind] for kind in kinds]


def plain_attention(text: Config, *, norms: bool = True) -> Attention:
    """Return the token mixer of models whose layers all have attention without gates; see
    `attention`."""
    text.expect("hidden_act", "silu")
    text.allow("attn_output_gate", False)
    if text.raw.get("layer_types") is not None:
        layer_types(text, ["full_attention"])
    return attention(text, gated=False, norms=norms)


def attention(text: Config, *, gated: bool, norms: bool = True) -> Attention:
    """Return attention over all keys; without `norms`, as in Qwen2, queries, keys and values have
    biases alone instead."""
    refuse_windows(text)
    biased = norms and bool(text.value("attention_bias"))
    sizes = Attention(
        heads=text.size("num_attention_heads"),
        kv_heads=text.size("num_key_value_heads"),
        head_dim=text.size("head_dim"),
        gated=gated,
        bias=biased or not norms,
        out_bias=biased,
        norms=QK_NORMS if norms else None,
    )
    check_groups("num_attention_heads", sizes.heads, sizes.kv_heads)
    return sizes


def gated_delta(text: Config, *, interleaved: bool = False) -> GatedDelta:
    """Return a Gated DeltaNet mixer."""
    sizes = GatedDelta(
        key_heads=text.size("linear_num_key_heads"),
        value_heads=text.size("linear_num_value_heads"),
        key_dim=text.size("linear_key_head_dim"),
        value_dim=text.size("linear_value_head_dim"),
        taps=text.size("linear_conv_kernel_dim"),
        interleaved=interleaved,
    )
    check_groups("linear_num_value_heads", sizes.value_heads, sizes.key_heads)
    return sizes


def check_limits(name: str, limits: tuple[float, float]) -> None:
    """Refuse limits of a step's length that no length keeps to. `name`: the field with them."""
    low, high = limits
    if not 0 <= low <= high or math.isinf(low):
        raise CheckpointError(f"{name} [{low}, {high}] is no range of positive lengths")


def refuse_windows(text: Config) -> None:
    """Refuse attention over a part of the keys, unless it is switched off."""
    if text.raw.get("use_sliding_window") is not False:
        text.allow("use_sliding_window", None)
        text.allow("sliding_window", None)


def check_groups(name: str, heads: int, key_heads: int) -> None:
    """Refuse heads that cannot share their key heads evenly. `name`: the field of their number."""
    if heads % key_heads:
        raise CheckpointError(f"{name} {heads} is no multiple of its {key_heads} key heads")


def mlp(text: Config) -> Mlp:
    """Return a dense feed-forward."""
    return Mlp(text.size("intermediate_size"))


def experts(text: Config, *, shared: bool, transposed: bool = False) -> Experts:
    """Return routed experts, whose weights sum to 1 for each token."""
    text.allow("norm_topk_prob", True)
    routed = routing(text, "num_experts")
    shared_size = text.size("shared_expert_intermediate_size") if shared else 0
    return Experts(routed, text.size("moe_intermediate_size"), shared_size, transposed=transposed)


def routing(text: Config, name: str) -> Routing:
    """Return the routing to experts, whose number is the field `name`."""
    sizes = Routing(text.size(name), text.size("num_experts_per_tok"))
    if sizes.top_k > sizes.num_experts:
        raise CheckpointError(
            f"num_experts_per_tok {sizes.top_k} exceeds {sizes.num_experts} experts"
        )
    return sizes


def sparse_layers(text: Config, sparse: Experts) -> list[FeedForward]:
    """Return experts in every layer but those that the file lists as dense."""
    step, dense = text.size("decoder_sparse_step"), text.given("mlp_only_layers")
    count = text.size("num_hidden_layers")
    routed = [index not in dense and (index + 1) % step == 0 for index in range(count)]
    return [sparse if chosen else mlp(text) for chosen in routed]


def model(
    config: Config,
    text: Config,
    layers: Iterable[tuple[Mixer, FeedForward]],
    rotation: Rope,
    *,
    family: Family,
    norms: tuple[str, str] = NORMS,
    centred: bool = True,
    eps: str = "rms_norm_eps",
    tower: Vision | None = None,
    mtp: LayerSpec | None = None,
) -> ModelSpec:
    """Return a model.

    Args:
        config: the whole config.json.
        text: the section of the language model.
        layers: mixers and feed-forwards, in their order.
        rotation: of queries and keys.
        family: conventions of tokenizer and chat template.
        norms: names of a layer's norms.
        centred: see `Norm`.
        eps: the field of its `eps`.
        tower: the vision tower, if there is one.
        mtp: the layer that drafts the token after next, if there is one.
    """
    return ModelSpec(
        hidden_size=text.size("hidden_size"),
        vocab_size=text.size("vocab_size"),
        max_position_embeddings=context(text, rotation),
        layers=tuple(LayerSpec.of(*parts, norms) for parts in layers),
        norm=Norm(text.positive(eps), centred=centred),
        rope=rotation,
        tied_embeddings=tied_embeddings(config, text),
        vision=tower,
        dtype=config.dtype(text),
        family=family,
        mtp=mtp,
    )


def vision(outer: Config, *, deepstack: bool, source: str = "", omni: bool = False) -> VisionSpec:
    """Return the vision tower; `deepstack`: its layers may add features to the decoder's;
    `source`: as of `Config.section`; `omni`: see `VisionSpec`."""
    config, kind = outer.section("vision_config", source), outer.raw["model_type"]
    # Published files also use the family's name, even the dense one's beside experts.
    plain = kind.removesuffix("_moe")
    names = (f"{kind}_vision", kind, plain, f"{plain}_vision", f"{kind}_vision_encoder")
    config.allow("model_type", *names)
    config.expect("hidden_act", "gelu_pytorch_tanh")
    if not deepstack and config.raw.get("deepstack_visual_indexes"):
        indexes = config.raw["deepstack_visual_indexes"]
        raise CheckpointError(f"deepstack_visual_indexes {indexes!r} is not supported, only []")
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
        rope_theta=axial_theta(config),
        deepstack=tuple(config.given("deepstack_visual_indexes")) if deepstack else (),
        omni=omni,
    )
    check_axial_heads(sizes)
    layers = list(sizes.deepstack)
    if layers != sorted(set(layers) & set(range(sizes.depth))):
        raise CheckpointError(
            f"deepstack_visual_indexes {layers} are not ascending layers below {sizes.depth}"
        )
    return sizes


def axial_theta(config: Config) -> float:
    """Return the base of a tower's rotation by rows and columns."""
    # No published file has this field, so transformers' value applies.
    angles = config.value("rope_parameters")
    if angles["rope_type"] != "axial":
        raise CheckpointError(f"rope_type {angles['rope_type']!r} is not supported, only 'axial'")
    theta = angles["rope_theta"]
    if not isinstance(theta, int | float) or not (math.isfinite(theta) and theta > 0):
        raise CheckpointError(f"the vision rope_theta must be positive, not {theta!r}")
    return float(theta)


def check_axial_heads(sizes: Vision) -> None:
    """Check that heads can be rotated by rows and columns."""
    if sizes.hidden_size % (4 * sizes.heads):
        raise CheckpointError(
            f"the vision hidden_size {sizes.hidden_size} is no multiple of 4 * num_heads, "
            f"{4 * sizes.heads}"
        )


def rope(text: Config, *, partial: bool, sections: bool, interleaved: bool = True) -> Rope:
    """Return the rotation of all or part of each head, by positions on three axes or on one;
    `interleaved`: see `Rope`."""
    fields = _fields(text)
    kind = _kind(fields)
    if not partial:
        fields.allow("partial_rotary_factor", 1)
    share = fields.positive("partial_rotary_factor") if partial else 1
    whole, theta = text.size("head_dim"), fields.positive("rope_theta")
    dims = int(whole * share)
    fits = 0 < dims <= whole and dims % 2 == 0
    yarn = _yarn(fields) if kind == "yarn" else None
    if yarn is not None and theta <= 1:
        raise CheckpointError(
            f"rope_theta in config.json must be more than 1 with YaRN, not {theta:g}"
        )
    if not sections:
        if not fits:
            raise CheckpointError(f"partial_rotary_factor {share} does not fit head_dim {whole}")
        return Rope(theta, dims, (dims // 2, 0, 0), yarn)
    fields.allow("mrope_interleaved", interleaved)
    given = fields.given("mrope_section")
    axes = tuple(given) if isinstance(given, list | tuple) else (given,)
    sized = len(axes) == 3 and all(type(size) is int and size >= 0 for size in axes)
    if not sized or not fits or not (interleaved or sum(axes) == dims // 2):
        raise CheckpointError(f"mrope_section {list(axes)} does not fit {dims} dims")
    return Rope(theta, dims, (axes[0], axes[1], axes[2]), yarn, interleaved)


def unrotated(text: Config) -> Rope:
    """Return the rotation of models whose attention has no positions: by angles of 0."""
    dims = text.size("head_dim")
    return Rope(1.0, dims, (dims // 2, 0, 0), turning=False)


def context(text: Config, rotation: Rope) -> int:
    """Return the tokens that the model is made for: those of config.json, or more with YaRN."""
    given = text.size("max_position_embeddings")
    return given if rotation.yarn is None else max(given, rotation.yarn.context)


def _fields(text: Config) -> Config:
    """Return the config with the fields of its rotation. As in transformers, `rope_scaling`
    replaces the whole of `rope_parameters`."""
    older, newer = text.inlined(_OLDER), text.inlined(_NEWER)
    if not (text.raw.get(_OLDER) and text.raw.get(_NEWER)):
        return text.inlined(_OLDER, _NEWER)
    for name in ("rope_theta", "partial_rotary_factor", "mrope_section"):
        lost = newer.raw.get(name)
        if lost is not None and older.raw.get(name) is None and older.given(name) != lost:
            raise _lost(name, lost)
    kind = newer.raw.get("rope_type", newer.raw.get("type"))
    if kind not in (None, "default", "mrope") and kind != _kind(older):
        raise _lost("rope_type", kind)
    return older


def _lost(name: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{_OLDER} in config.json replaces {_NEWER}, whose {name} {value!r} would be lost: "
        f"write it into {_OLDER} too"
    )


def _kind(fields: Config) -> str:
    kind = fields.raw.get("rope_type", fields.raw.get("type"))
    if kind is None:
        return "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CheckpointError(f"rope_type {kind!r} is not supported, only 'default' and 'yarn'")
    return _KINDS[kind]


def _yarn(fields: Config) -> Yarn:
    """Return YaRN's numbers; those that are left out are transformers'."""
    raw, factor = fields.raw, fields.positive("factor")
    if factor < 1:
        raise CheckpointError(f"factor in config.json must be at least 1 with YaRN, not {factor:g}")
    original = "original_max_position_embeddings"
    names = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    numbers = {name: fields.positive(name) if raw.get(name) is not None else None for name in names}
    scale, top, bottom = (numbers[name] for name in names[:3])
    if scale is None:
        scale = yarn_scale(factor)
        if top is not None and bottom is not None:
            scale = yarn_scale(factor, top) / yarn_scale(factor, bottom)
    return Yarn(
        factor=factor,
        original=fields.size(original if raw.get(original) else "max_position_embeddings"),
        fast=numbers["beta_fast"] or 32,
        slow=numbers["beta_slow"] or 1,
        whole=bool(raw.get("truncate", True)),
        scale=scale,
    )
