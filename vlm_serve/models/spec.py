"""A model as data: its layers and everything else but the weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from vlm_serve.errors import ConfigError
from vlm_serve.models.cache_layout import CacheLayout, Pool
from vlm_serve.models.parts.base import FeedForward, Loader, Mixer, Norm, Routing
from vlm_serve.models.quantization.scheme import QuantScheme
from vlm_serve.preprocess.family import Family


@dataclass(frozen=True)
class Rope:
    """`rotary_dim` of each head's dims are rotated; `sections` says how many of the
    `rotary_dim / 2` frequencies take the temporal, height and width position."""

    theta: float
    rotary_dim: int
    sections: tuple[int, int, int]


class Tower(Protocol):
    """A loaded vision tower."""

    def encode(
        self,
        patches: torch.Tensor,
        grids: Sequence[tuple[int, int, int]],
        merges: Sequence[int] | None = None,
        *,
        deterministic: bool = False,
    ) -> list[torch.Tensor]:
        """Embeddings of the pictures that `MediaItem.patches` gives, one after the other.

        Args:
            patches: float32, all their patches.
            grids: (1, h, w) of each, in patches.
            merges: patches per side that become one token, of each; None: as the config has it.
            deterministic: each result has the bits of encoding it alone.
        """
        ...


class Vision(Protocol):
    """A vision tower as data. `deepstack` names its layers that add features behind the decoder's
    first layers, none in most; `anchor` is the name of one of its tensors, `layers` the beginning
    of those of its `depth` layers."""

    @property
    def anchor(self) -> str: ...
    @property
    def layers(self) -> str: ...
    @property
    def depth(self) -> int: ...
    @property
    def out_hidden_size(self) -> int: ...
    @property
    def deepstack(self) -> tuple[int, ...]: ...

    def load(self, source: Loader, prefix: str, dtype: torch.dtype) -> Tower:
        """Reads its weights; names start with `prefix`, activations are of type `dtype`."""
        ...


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
        mtp: the layer that drafts the token after next (`mtp.py`); None: there is none.
        generation: the content of generation_config.json: defaults of sampling.
        quantization: how its weights are quantised; None if none are.
        defaulted: the fields that config.json left to a class of transformers, with its name.
    """

    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    norm: Norm
    rope: Rope
    tied_embeddings: bool
    vision: Vision | None
    dtype: torch.dtype
    family: Family
    input_norm: str = "input_layernorm"
    post_norm: str = "post_attention_layernorm"
    mtp: LayerSpec | None = None
    generation: Mapping[str, Any] = field(default_factory=dict, compare=False)
    quantization: QuantScheme | None = None
    defaulted: Mapping[str, str] = field(default_factory=dict, compare=False)

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

    def cache_layout(self, ranks: int = 1, *, mtp: bool = False) -> CacheLayout:
        """The pools that one of `ranks` ranks holds; with `mtp` also those of the layer that
        drafts, behind all others: its KV, and in every state row the last token's hidden state.

        Raises:
            ConfigError: the heads cannot be shared out.
        """
        for layer in self.layers:
            repeated = layer.mixer.heads_to_repeat()
            shared = layer.mixer.heads_to_split(), layer.feed_forward.columns_to_split(), repeated
            for name, count in itertools.chain(*(each.items() for each in shared)):
                few = name in repeated and ranks % count == 0
                if count % ranks and not few:
                    raise ConfigError(
                        f"tensor_parallel_size: {count} {name} cannot be split over {ranks} ranks",
                        param="tensor_parallel_size",
                    )
        pools = [layer.mixer.pools() for layer in self.layers]
        if mtp:
            assert self.mtp is not None
            hidden = Pool("hidden", "row", (self.hidden_size,), split=None)
            pools.append((*self.mtp.mixer.pools(), hidden))
        return CacheLayout.of(pools, ranks)
