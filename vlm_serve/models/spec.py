"""A model as data: its layers and everything else but the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from vlm_serve.errors import ConfigError
from vlm_serve.models.cache_layout import CacheLayout
from vlm_serve.models.parts.base import FeedForward, Mixer, Norm, Routing
from vlm_serve.models.quantization.scheme import QuantScheme
from vlm_serve.preprocess.family import Family


@dataclass(frozen=True)
class Rope:
    """`rotary_dim` of each head's dims are rotated; `sections` says how many of the
    `rotary_dim / 2` frequencies take the temporal, height and width position."""

    theta: float
    rotary_dim: int
    sections: tuple[int, int, int]


@dataclass(frozen=True)
class VisionSpec:
    """The vision tower. `num_positions` is a square: the learned grid of position embeddings.
    `deepstack` lists the layers, ascending, behind which a merger of its own makes features that
    are added to the residual behind the decoder's first layers, one after the other."""

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
    deepstack: tuple[int, ...] = ()

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: norm, token mixer, norm, feed-forward."""

    mixer: Mixer
    feed_forward: FeedForward


@dataclass(frozen=True)
class ModelSpec:
    """A model.

    Attributes:
        norm: before mixers and feed-forwards, and behind the last layer.
        vision: None for a text-only model.
        dtype: of the checkpoint's weights.
        family: what its tokenizer and its chat template agree on.
        input_norm, post_norm: names of a layer's norms in the checkpoint.
        generation: the content of generation_config.json: defaults of sampling.
        quantization: how its weights are quantised; None if none are.
    """

    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    norm: Norm
    rope: Rope
    tied_embeddings: bool
    vision: VisionSpec | None
    dtype: torch.dtype
    family: Family
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    generation: Mapping[str, Any] = field(default_factory=dict, compare=False)
    quantization: QuantScheme | None = None

    @cached_property
    def routing(self) -> Routing | None:
        """How the layers with routed experts choose them, all alike; None if there are none."""
        found = {layer.feed_forward.routing for layer in self.layers} - {None}
        assert len(found) <= 1, "layers route alike"
        return found.pop() if found else None

    @property
    def expert_layers(self) -> int:
        """Number of layers with routed experts."""
        return sum(layer.feed_forward.routing is not None for layer in self.layers)

    @property
    def media_features(self) -> int:
        """Decoder layers behind which media add features."""
        return 0 if self.vision is None else len(self.vision.deepstack)

    @property
    def embedding_width(self) -> int:
        """Numbers that stand for a token of a medium: its embedding, then its features."""
        return (1 + self.media_features) * self.hidden_size

    def cache_layout(self, ranks: int = 1) -> CacheLayout:
        """The pools that one of `ranks` ranks holds.

        Raises:
            ConfigError: the heads cannot be shared out.
        """
        for mixer in {layer.mixer for layer in self.layers}:
            for name, heads in mixer.heads_to_split().items():
                if heads % ranks:
                    raise ConfigError(
                        f"tp: {heads} {name} cannot be split over {ranks} ranks", param="tp"
                    )
        return CacheLayout.of((layer.mixer.pools() for layer in self.layers), ranks)
