"""The vision towers of Qwen2-VL and Qwen2.5-VL: positions by rotation alone, and in Qwen2.5-VL
attention within windows in most layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vlm_serve.kernels.elementwise import times_sigmoid
from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.rope.halves import rotate_halves
from vlm_serve.models.spec import Vision
from vlm_serve.models.vision import Grid
from vlm_serve.models.vision_parts import (
    Affine,
    AttentionPart,
    GridMemory,
    MlpPart,
    Products,
    TowerReader,
    attend,
    axial_frequencies,
    block_order,
    layer_norm,
)
from vlm_serve.models.weights import Weights

_QUICK = 1.702
"""Factor of the sigmoid's argument in the fast approximation of GELU."""


@dataclass(frozen=True, kw_only=True)
class RotaryVisionSpec(Vision):
    """The towers of Qwen2-VL and Qwen2.5-VL.

    Attributes:
        rope_theta: base of the rotation.
        gated: feed-forwards have gates, and norms are root-mean-square norms, as in Qwen2.5-VL.
        window: tokens per side of a window; 0: there are none.
        whole: the layers that attend to the whole picture although there are windows.
    """

    anchor = "patch_embed.proj.weight"
    layers = "blocks."

    rope_theta: float
    gated: bool
    window: int = 0
    whole: frozenset[int] = frozenset()

    def load(self, source: Weights, prefix: str, dtype: torch.dtype) -> RotaryVisionTower:
        return RotaryVisionTower(self, source, prefix, dtype)


@dataclass(frozen=True, slots=True)
class _Table:
    """Tables of a grid: `order` of its tokens, `back` to the order before, cosines and
    sines `[2, n, head_dim / 2]` of patches in this order, and the patches of each window."""

    order: torch.Tensor
    back: torch.Tensor
    turns: torch.Tensor
    windows: list[int]


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """A feed-forward with a gate, `wide`; without `up` with the fast approximation of GELU."""

    norm: Affine
    wide: Linear
    up: Linear | None
    narrow: Linear

    def __call__(self, x: torch.Tensor, how: Products) -> torch.Tensor:
        normed = layer_norm(x, self.norm)
        if self.up is None:
            wide = how(self.wide, normed)
            hidden = times_sigmoid(wide, _QUICK * wide)
        else:
            gates = how(self.wide, normed, activation="silu")
            hidden = how(self.up, normed, times=gates)
        return how(self.narrow, hidden, plus=x)


class RotaryVisionTower:
    """transformers' Qwen2VisionTransformerPretrainedModel and its twin of Qwen2.5-VL.

    Tokens are sorted by window, windows by their size, so that the patches of a window are
    neighbours and few calls compute all; attention does not depend on their order.

    Args:
        config: sizes.
        source: of the tensors.
        prefix: of their names.
        dtype: of activations.
    """

    def __init__(
        self, config: RotaryVisionSpec, source: Weights, prefix: str, dtype: torch.dtype
    ) -> None:
        self._config, self._device, self._dtype = config, source.device, dtype
        reader = _Reader(source, prefix, config)
        self._patch_embed = reader.patch_embed()
        self._blocks = tuple(reader.block(index) for index in range(config.depth))
        self._merger = reader.merger()
        self._inv_freq = axial_frequencies(config.hidden_size // config.heads, config.rope_theta)
        self._table = GridMemory(self._compute_table)

    @torch.inference_mode()
    def encode(
        self,
        patches: torch.Tensor,
        grids: Sequence[Grid],
        merges: Sequence[int] | None = None,
        *,
        deterministic: bool = False,
        changes: AdapterChanges | None = None,
    ) -> list[torch.Tensor]:
        """Embed several temporal patches at once; each result equals encoding it alone.

        Args:
            patches: float32 `[sum of h * w, channels * temporal * patch * patch]`, normalised
                pixels in merge-block order, grid after grid.
            grids, merges, deterministic, changes: see `Tower.encode`; the merge is the config's.

        Returns:
            `[h * w / merge**2, out_hidden_size]` in the model's dtype for each grid.
        """
        config, area = self._config, self._config.merge_size**2
        sizes = [height * width for _, height, width in grids]
        assert set(merges or ()) <= {config.merge_size}, "this tower merges in one way"
        assert patches.shape == (sum(sizes), config.patch_dim), "patches do not fit the grids"
        tables = [self._table(height, width) for _, height, width in grids]
        how = Products(deterministic, changes if changes is not None and changes.tower else None)
        pieces = patches.to(self._device, self._dtype).split_with_sizes(sizes)
        ordered = [
            piece.view(-1, area, config.patch_dim)[table.order].flatten(0, 1)
            for piece, table in zip(pieces, tables, strict=True)
        ]
        windows = [size for table in tables for size in table.windows]
        turns = torch.cat([table.turns for table in tables], dim=1)
        x = how(self._patch_embed, torch.cat(ordered))
        for index, (attention, feed_forward) in enumerate(self._blocks):
            lengths = windows if config.window and index not in config.whole else sizes
            turned = partial(_attend_turned, turns=turns, sizes=lengths)
            x = attention(x, config.heads, turned, how)
            x = feed_forward(x, how)
        squares = layer_norm(x, self._merger.norm).view(-1, area * config.hidden_size)
        merged = self._merger.of_normed(squares, "gelu", how)
        rows = merged.split_with_sizes([size // area for size in sizes])
        return [row[table.back] for row, table in zip(rows, tables, strict=True)]

    def fixed(self, most: int) -> None:
        """Implement `Tower.fixed`."""

    def _compute_table(self, height: int, width: int) -> _Table:
        merge = self._config.merge_size
        tokens, down, right = height * width // merge**2, height // merge, width // merge
        side = self._config.window or max(down, right)
        across = -(-right // side)
        places = torch.arange(tokens)
        window = places // right // side * across + places % right // side
        counts = window.bincount()
        order = (counts[window] * len(counts) + window).argsort(stable=True)
        angles = torch.cat(
            [axis.float()[:, None] * self._inv_freq for axis in block_order(height, width, merge)],
            dim=1,
        ).view(tokens, merge**2, -1)[order]
        turns = torch.stack([angles.cos(), angles.sin()]).flatten(1, 2)
        return _Table(
            order.to(self._device),
            order.argsort().to(self._device),
            turns.to(self._device),
            (counts.sort().values * merge**2).tolist(),
        )


def _attend_turned(
    qk: torch.Tensor, v: torch.Tensor, *, turns: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    return attend(rotate_halves(qk, turns), v, sizes)


class _Reader(TowerReader):
    """Names and shapes of the tower's tensors."""

    def __init__(self, source: Weights, prefix: str, config: RotaryVisionSpec) -> None:
        super().__init__(source, prefix)
        self._config, self._hidden = config, config.hidden_size

    def patch_embed(self) -> Linear:
        """Load a convolution whose stride equals its kernel, as a projection of flattened
        patches."""
        config = self._config
        kernel = (config.in_channels, config.temporal_patch_size, *[config.patch_size] * 2)
        return self.projection("patch_embed.proj", self._hidden, *kernel, bias=False)

    def merger(self) -> MlpPart:
        merged = self._hidden * self._config.merge_size**2
        return MlpPart(
            self._norm("merger.ln_q"),
            self.projection("merger.mlp.0", merged, merged),
            self.projection("merger.mlp.2", self._config.out_hidden_size, merged),
        )

    def block(self, index: int) -> tuple[AttentionPart, _FeedForward]:
        hidden, wide, name = self._hidden, self._config.intermediate_size, f"blocks.{index}"
        attention = AttentionPart(
            self._norm(f"{name}.norm1"),
            self.projection(f"{name}.attn.qkv", 3 * hidden, hidden),
            self.projection(f"{name}.attn.proj", hidden, hidden),
        )
        gated = self._config.gated
        first, last = ("gate_proj", "down_proj") if gated else ("fc1", "fc2")
        return attention, _FeedForward(
            self._norm(f"{name}.norm2"),
            self.projection(f"{name}.mlp.{first}", wide, hidden),
            self.projection(f"{name}.mlp.up_proj", wide, hidden) if gated else None,
            self.projection(f"{name}.mlp.{last}", hidden, wide),
        )

    def _norm(self, name: str) -> Affine:
        return self.norm(name, self._hidden, bias=not self._config.gated)
