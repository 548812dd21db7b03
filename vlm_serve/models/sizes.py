"""Sizes of a Qwen3.5 language model and vision tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerType = Literal["linear_attention", "full_attention"]


@dataclass(frozen=True)
class RopeConfig:
    """M-RoPE: `rotary_dim` of each head's dims are rotated; `sections` says how many of the
    `rotary_dim / 2` frequencies take the temporal, height and width position."""

    theta: float
    rotary_dim: int
    sections: tuple[int, int, int]


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts and the shared one, in every layer."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int


@dataclass(frozen=True)
class TextConfig:
    """The language model. `intermediate_size` is 0 where `moe` is given."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layer_types: tuple[LayerType, ...]
    attention_heads: int
    kv_heads: int
    head_dim: int
    attention_bias: bool
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_kernel: int
    norm_eps: float
    rope: RopeConfig
    moe: MoEConfig | None
    tied_embeddings: bool
    max_position_embeddings: int

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def attention_layers(self) -> int:
        """Number of full-attention layers: those with KV blocks."""
        return self.layer_types.count("full_attention")

    @property
    def gdn_layers(self) -> int:
        """Number of Gated DeltaNet layers: those with state rows."""
        return self.layer_types.count("linear_attention")

    @property
    def moe_layers(self) -> int:
        """Number of layers with routed experts."""
        return self.num_layers if self.moe else 0

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values of a GDN layer."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    @property
    def value_dim(self) -> int:
        """Output channels of a GDN layer before its output projection."""
        return self.gdn_value_heads * self.gdn_value_dim


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower. `num_positions` is a square: the learned grid of position embeddings."""

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_hidden_size: int
    num_positions: int
    rope_theta: float

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2
