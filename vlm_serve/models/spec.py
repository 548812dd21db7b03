"""A model as data: its layers, its rotary positions and everything else except the weights."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch

from vlm_serve.errors import ConfigError
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.rope import mrope_cos_sin
from vlm_serve.kernels.rope.compiled import axes
from vlm_serve.models.cache_layout import CacheLayout, Pool
from vlm_serve.models.classifier import Classifier
from vlm_serve.models.parts.base import FeedForward, Mixer, Norm, Routing
from vlm_serve.models.quantization.scheme import QuantScheme
from vlm_serve.models.weights import Weights
from vlm_serve.preprocess.text.family import Family


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071), as transformers computes it: slow frequencies are divided by
    `factor`, fast ones stay, and those between are mixed.

    Attributes:
        factor: of the context's length.
        original: length of the context before it was extended, in tokens.
        fast, slow: rotations over the original context from which on a frequency stays, and up to
            which it is divided.
        whole: whether the bounds between them are rounded to whole frequencies.
        scale: factor of cosines and sines.
    """

    factor: float
    original: int
    fast: float
    slow: float
    whole: bool
    scale: float

    @property
    def context(self) -> int:
        """Length of the extended context, in tokens."""
        return int(self.original * self.factor)

    def frequencies(self, periods: torch.Tensor, theta: float) -> torch.Tensor:
        """Return the frequencies of the extended context, from the periods of the original one."""
        dims = 2 * len(periods)
        low, high = (self._dim(turns, dims, theta) for turns in (self.fast, self.slow))
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        width = high - low or 0.001
        divided = (torch.arange(dims // 2, dtype=torch.float) - low) / width
        kept = 1 - divided.clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _dim(self, turns: float, dims: int, theta: float) -> float:
        """Return the place of the frequency that makes so many rotations in the original
        context."""
        return dims * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's own scale of cosines and sines for this factor."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rope:
    """`rotary_dim` of each head's dims are rotated; `sections` gives the number of the
    `rotary_dim / 2` frequencies for temporal, height and width position, which alternate if
    `interleaved`. Without `turning` all angles are 0: heads stay as they are, to the bit."""

    theta: float
    rotary_dim: int
    sections: tuple[int, int, int]
    yarn: Yarn | None = None
    interleaved: bool = True
    turning: bool = True

    @property
    def axes(self) -> torch.Tensor:
        """The axis of each frequency, int32 `[rotary_dim / 2]`."""
        return axes(self.rotary_dim // 2, self.sections, self.interleaved)

    def cos_sin(
        self, positions: torch.Tensor, inv_freq: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of tokens, see `mrope_cos_sin`; `inv_freq`: `frequencies`."""
        return mrope_cos_sin(positions, inv_freq, self.sections, self.scale, self.interleaved)

    @property
    def scale(self) -> float:
        """The factor of cosines and sines."""
        return 1.0 if self.yarn is None else self.yarn.scale

    def frequencies(self) -> torch.Tensor:
        """Return the angles per position, float32 `[rotary_dim / 2]`."""
        if not self.turning:
            return torch.zeros(self.rotary_dim // 2)
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float)
        periods = self.theta ** (exponents / self.rotary_dim)
        return 1.0 / periods if self.yarn is None else self.yarn.frequencies(periods, self.theta)


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


@dataclass(frozen=True, kw_only=True)
class Vision(ABC):
    """A vision tower as data.

    Attributes:
        anchor: the name of one of its tensors.
        layers: prefix of the names of its layers' tensors.
        has_fixed_form: True if a captured run may encode pictures.
        depth: number of layers.
        merge_size: patches per side that become a token.
        deepstack: the layers whose features are added behind the decoder's first layers.
    """

    anchor: ClassVar[str]
    layers: ClassVar[str]
    has_fixed_form: ClassVar[bool] = False

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int = 1
    merge_size: int
    out_hidden_size: int
    deepstack: tuple[int, ...] = ()

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @abstractmethod
    def load(self, source: Weights, prefix: str, dtype: torch.dtype) -> Tower:
        """Read its weights; names start with `prefix`, activations have `dtype`."""


@dataclass(frozen=True)
class BranchSpec:
    """A residual branch: a part of the norm of the residual, which is added to it.

    Attributes:
        part: a token mixer or a feed-forward.
        norm: name of the norm within the layer; None: the part takes what the branch before it
            took, behind a feed-forward.
    """

    part: Mixer | FeedForward
    norm: str | None


NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: residual branches, one after the other."""

    branches: tuple[BranchSpec, ...]

    @classmethod
    def of(
        cls, mixer: Mixer, feed_forward: FeedForward, norms: tuple[str, str] = NORMS
    ) -> LayerSpec:
        """Return the usual layer: norm, token mixer, norm, feed-forward; `norms`: their names."""
        return cls((BranchSpec(mixer, norms[0]), BranchSpec(feed_forward, norms[1])))

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Token mixers of all branches, in order."""
        return tuple(each.part for each in self.branches if isinstance(each.part, Mixer))

    @property
    def feed_forwards(self) -> tuple[FeedForward, ...]:
        """Feed-forwards of all branches, in order."""
        return tuple(each.part for each in self.branches if isinstance(each.part, FeedForward))

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of its memory between steps."""
        return tuple(itertools.chain(*(mixer.pools() for mixer in self.mixers)))


@dataclass(frozen=True)
class Scales:
    """Factors of embeddings and of what a branch adds to the residual, and the divisor of logits,
    as in Granite."""

    embeddings: float = 1.0
    branches: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A model.

    Attributes:
        norm: before mixers and feed-forwards, and behind the last layer.
        scales: of the residual and of logits.
        vision: None for a text-only model.
        dtype: of the checkpoint's weights.
        family: conventions of its tokenizer and its chat template.
        last_norm: name of the norm behind the last layer.
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
    last_norm: str = "norm"
    scales: Scales = Scales()
    mtp: LayerSpec | None = None
    generation: Mapping[str, Any] = field(default_factory=dict, compare=False)
    quantization: QuantScheme | None = None
    defaulted: Mapping[str, str] = field(default_factory=dict, compare=False)
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def classifier(self) -> Classifier | None:
        """The head that labels prompts; None: the model generates."""
        return Classifier.of(self.config)

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings. The residual is computed over the factor of branches, which
        every norm of it cancels: so branches add what they are, and no operation scales them."""
        return self.scales.embeddings / self.scales.branches

    @property
    def residual_eps(self) -> float:
        """The eps of norms of such a residual."""
        return self.norm.eps / self.scales.branches**2

    @cached_property
    def routing(self) -> Routing | None:
        """Routing of the layers with routed experts, the same for all; None if there are none."""
        routings = {part.routing for layer in self.layers for part in layer.feed_forwards} - {None}
        assert len(routings) <= 1, "layers route alike"
        return routings.pop() if routings else None

    @property
    def expert_layers(self) -> int:
        """Number of layers with routed experts."""
        parts = (part for layer in self.layers for part in layer.feed_forwards)
        return sum(part.routing is not None for part in parts)

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
        for part in (branch.part for layer in self.layers for branch in layer.branches):
            repeated = part.heads_to_repeat() if isinstance(part, Mixer) else {}
            split = part.heads_to_split() if isinstance(part, Mixer) else part.columns_to_split()
            for name, count in (*split.items(), *repeated.items()):
                few = name in repeated and ranks % count == 0
                if count % ranks and not few:
                    raise ConfigError(
                        f"tensor_parallel_size: {count} {name} cannot be split over {ranks} ranks",
                        param="tensor_parallel_size",
                    )
        pools = [layer.pools for layer in self.layers]
        if mtp:
            assert self.mtp is not None
            hidden = Pool("hidden", "activations", "row", (self.hidden_size,), split=None)
            pools.append((*self.mtp.pools, hidden))
        return CacheLayout.of(pools, ranks)
