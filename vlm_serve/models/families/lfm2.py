"""LFM2 and LFM2.5: short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import Config, Defaults
from vlm_serve.models.families import shared
from vlm_serve.models.parts.attention import Attention
from vlm_serve.models.parts.base import FeedForward, Mixer
from vlm_serve.models.parts.feed_forward import Mlp
from vlm_serve.models.parts.short_conv import ShortConv
from vlm_serve.models.spec import ModelSpec
from vlm_serve.preprocess.text.family import CHATML

PARTS = ("w1", "w3", "w2")
"""Names of gate, up and down."""
TEXT: dict[str, Any] = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "rope_theta": 1000000.0,
    # Of the models' attention; the classes have no such field.
    "head_dim": shared.quotient_head_dim,
}
DEFAULTS: Defaults = {
    "Lfm2Config": TEXT
    | {
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
}
"""Defaults of transformers' classes, for fields that a file omits."""


def spec(config: Config) -> ModelSpec:
    """Return the model of a config.json."""
    return language_model(config, config, dense_layers(config))


def language_model(config: Config, text: Config, feed_forwards: Sequence[FeedForward]) -> ModelSpec:
    """Return the model whose language part is the section `text` of a config.json, with these
    feed-forwards."""
    layers = zip(_mixers(text), feed_forwards, strict=True)
    rope = shared.rope(text, partial=False, sections=False)
    norms = ("operator_norm", "ffn_norm")
    model = shared.model(
        config, text, layers, rope, family=CHATML, norms=norms, centred=False, eps="norm_eps"
    )
    return replace(model, last_norm="embedding_norm", tied_embeddings=tied_embeddings(text))


def tied_embeddings(config: Config) -> bool:
    """Return whether embeddings are tied."""
    return bool(config.given(_named(config, "tie_embedding", "tie_word_embeddings")))


def _named(text: Config, *names: str) -> str:
    """Return the name under which a file has a field: as in transformers' classes the older name
    counts, if both are there."""
    return next((name for name in names[:-1] if text.raw.get(name) is not None), names[-1])


def _mixers(text: Config) -> list[Mixer]:
    count, attending = text.size("num_hidden_layers"), text.raw.get("full_attn_idxs")
    kinds = ["full_attention"] * count
    if text.raw.get("layer_types"):
        kinds = shared.layer_types(text, ("conv", "full_attention"))
    elif isinstance(attending, list):
        kinds = ["full_attention" if index in attending else "conv" for index in range(count)]
    shared.refuse_windows(text)
    text.allow("hidden_act", "silu")
    attention = Attention(
        heads=text.size("num_attention_heads"),
        kv_heads=text.size("num_key_value_heads"),
        head_dim=text.size("head_dim"),
        gated=False,
        norms=("q_layernorm", "k_layernorm"),
        out="out_proj",
    )
    shared.check_groups("num_attention_heads", attention.heads, attention.kv_heads)
    bias, taps = bool(text.given("conv_bias")), text.size("conv_L_cache")
    if taps < 2:
        raise CheckpointError("conv_L_cache 1 is not supported: such layers have no state")
    conv = ShortConv(text.size("hidden_size"), taps, bias)
    return [attention if kind == "full_attention" else conv for kind in kinds]


def dense_layers(text: Config) -> list[FeedForward]:
    """Return dense feed-forwards, whose size transformers' Lfm2MLP adjusts unless told not to."""
    size = text.size(_named(text, "block_ff_dim", "intermediate_size"))
    if text.given("block_auto_adjust_ff_dim"):
        size, multiple = int(2 * size / 3), text.size("block_multiple_of")
        size = int(text.positive("block_ffn_dim_multiplier") * size)
        size = -(-size // multiple) * multiple
    return [Mlp(size, "feed_forward", PARTS)] * text.size("num_hidden_layers")
