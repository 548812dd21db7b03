"""Sizes of the demo models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoShape:
    """Sizes of a demo model. `experts == 0` is the dense model."""

    vocab: int
    hidden: int = 128
    layers: int = 4
    attention_every: int = 2
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_dims: int = 16
    rope_sections: tuple[int, int, int] = (4, 2, 2)
    rope_theta: float = 10_000.0
    key_heads: int = 4
    value_heads: int = 4
    state_dim: int = 32
    conv_kernel: int = 4
    chunk: int = 32
    experts: int = 0
    experts_per_token: int = 2
    expert_intermediate: int = 64
    vision_hidden: int = 128
    vision_depth: int = 3
    vision_heads: int = 4
    vision_intermediate: int = 256
    vision_grid: int = 10
    patch_values: int = 384
    merge: int = 2

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0
