"""A model as data: its layers and everything else except the weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from vlm_serve.errors import ConfigError
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.models.cache_layout import CacheLayout, Pool
from vlm_serve.models.parts.base import FeedForward, Loader, Mixer, Norm, Routing
from vlm_serve.models.quantization.scheme import QuantScheme
from vlm_serve.models.rope import Rope
from vlm_serve.preprocess.family import Family


class FixedTower(Protocol):
    """A tower over inputs at fixed addresses, for captured runs.

    Attributes:
        area: patches of a token.
        heads, head_dim: of its attention.
    """

    area: int
    heads: int
    head_dim: int

    def fill(self, patches: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> None:
        """Write pictures, see `Tower.encode`; the rest stays as it is."""
        ...

    def run(self, size: int, tiles: torch.Tensor) -> torch.Tensor:
        """Embed the first `size` patches; return a row for each `area` of them. Rows of patches in
        no picture are undefined, and no other row depends on them.

        Args:
            size: a multiple of `area`.
            tiles: bounds of pictures, see `segment_tiles`.
        """
        ...


class Tower(Protocol):
    """A loaded vision tower."""

    def encode(
        self,
        patches: torch.Tensor,
        grids: Sequence[tuple[int, int, int]],
        merges: Sequence[int] | None = None,
        *,
        deterministic: bool = False,
        changes: AdapterChanges | None = None,
    ) -> list[torch.Tensor]:
        """Return embeddings of the pictures given by `MediaItem.patches`, one after the other.

        Args:
            patches: float32, all their patches.
            grids: (1, h, w) of each, in patches.
            merges: patches per side that become one token, of each; None: as in the config.
            deterministic: each result has the bits of encoding it alone.
            changes: the adapter of all of them.
        """
        ...

    def fixed(self, most: int) -> FixedTower | None:
        """Return the tower over inputs at fixed addresses, for `most` patches; None without
        `Vision.has_fixed_form`."""
        ...


class Vision(Protocol):
    """A vision tower as data. `deepstack` names the layers whose features are added behind the
    decoder's first layers, none in most. `anchor` is the name of one of its tensors, `layers` the
    prefix of those of its `depth` layers. `merge_size` patches per side become a token; each is a
    row of `patch_dim` numbers. With `has_fixed_form`, a captured run may encode pictures."""

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
    @property
    def merge_size(self) -> int: ...
    @property
    def patch_dim(self) -> int: ...
    @property
    def has_fixed_form(self) -> bool: ...

    def load(self, source: Loader, prefix: str, dtype: torch.dtype) -> Tower:
        """Read its weights; names start with `prefix`, activations have `dtype`."""
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
        family: conventions of its tokenizer and its chat template.
        input_norm, post_norm: names of a layer's norms in the checkpoint.
        mtp: the layer that drafts the token after next (`mtp.py`); None: there is none.
        generation: the content of generation_config.json: defaults of sampling.
        quantization: of its weights; None if none are quantised.
        defaulted: the fields that config.json left to a class of transformers, with its name.
        config: the content of config.json that all of this follows from, with the changes that
            options ask for.
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
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def routing(self) -> Routing | None:
        """Routing of the layers with routed experts, the same for all; None if there are none."""
        found = {layer.feed_forward.routing for layer in self.layers} - {None}
        assert len(found) <= 1, "layers route alike"
        return found.pop() if found else None

    @property
    def expert_layers(self) -> int:
        """Number of layers with routed experts."""
        return sum(layer.feed_forward.routing is not None for layer in self.layers)

    @property
    def media_features(self) -> int:
        """Number of decoder layers that add media features."""
        return 0 if self.vision is None else len(self.vision.deepstack)

    @property
    def embedding_width(self) -> int:
        """Numbers per media token: its embedding, then its features."""
        return (1 + self.media_features) * self.hidden_size

    def cache_layout(self, ranks: int = 1, *, mtp: bool = False) -> CacheLayout:
        """Return the pools of one of `ranks` ranks. With `mtp` the draft layer's come last: its KV,
        and the last token's hidden state in every state row.

        Raises:
            ConfigError: the heads cannot be split.
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
