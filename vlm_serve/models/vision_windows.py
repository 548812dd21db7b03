"""The vision tower of MiniCPM-V: attention within one slice, nearest learned positions, a merger of
2x2 windows between its layers and one behind the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.models.parts.base import Loader
from vlm_serve.models.vision_parts import (
    Affine,
    GridMemory,
    Products,
    TowerReader,
    attend,
    layer_norm,
    nearest_positions,
    nested_order,
)

_WINDOW = 4
"""Patches per window, and windows per token."""

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class WindowVisionSpec:
    """The tower of MiniCPM-V.

    Attributes:
        side: of the square of learned position embeddings.
        merged_layer: behind this layer windows of 2x2 patches become one, if a token covers 4x4 of
            them.
        merge_size: patches per side that become one token, unless a picture overrides it: 2 or 4.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    heads: int
    in_channels: int
    patch_size: int
    side: int
    merged_layer: int
    merge_size: int
    out_hidden_size: int

    @property
    def anchor(self) -> str:
        """The name of one of its tensors."""
        return "vision_tower.post_layernorm.weight"

    @property
    def layers(self) -> str:
        """Prefix of the names of its layers' tensors."""
        return "vision_tower.encoder.layers."

    @property
    def deepstack(self) -> tuple[int, ...]:
        """No layer adds features."""
        return ()

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.patch_size**2

    @property
    def has_fixed_form(self) -> bool:
        """Implement `Vision.has_fixed_form`."""
        return False

    def load(self, source: Loader, prefix: str, dtype: torch.dtype) -> WindowVisionTower:
        """Implement `Vision.load`."""
        return WindowVisionTower(self, source, prefix, dtype)


@dataclass(frozen=True, slots=True)
class _Attention:
    norm: Affine
    qkv: Linear
    out: Linear


@dataclass(frozen=True, slots=True)
class _Mlp:
    norm: Affine
    wide: Linear
    narrow: Linear


@dataclass(frozen=True, slots=True)
class _Block:
    attention: _Attention
    mlp: _Mlp


class WindowVisionTower:
    """transformers' MiniCPMV4_6VisionModel and its mergers.

    Patches are sorted into merge order, so that the patches of a window and of a token are
    neighbours; attention does not depend on their order.

    Args:
        config: sizes.
        source: of the tensors.
        prefix: of their names.
        dtype: of activations.
    """

    def __init__(
        self, config: WindowVisionSpec, source: Loader, prefix: str, dtype: torch.dtype
    ) -> None:
        self._config, self._device, self._dtype = config, source.device, dtype
        reader = _Reader(source, prefix, config)
        self._patch_embed = reader.patch_embed()
        self._positions = reader.positions()
        self._blocks = tuple(reader.block(index) for index in range(config.depth))
        self._window = reader.window()
        self._last_norm = reader.norm("vision_tower.post_layernorm", config.hidden_size)
        self._merger = reader.merger()
        self._grid_tensors = GridMemory(self._compute_grid_tensors)

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
        """Embed several pictures or slices at once; each result equals encoding it alone.

        Args:
            patches: float32 `[sum of h * w, channels * patch * patch]`, normalised pixels, row by
                row, grid after grid.
            grids, merges, deterministic, changes: see `Tower.encode`; sides are multiples of the
                merge.

        Returns:
            `[h * w / merge**2, out_hidden_size]` in the model's dtype for each grid.
        """
        sizes = [height * width for _, height, width in grids]
        assert patches.shape == (sum(sizes), self._config.patch_dim), "patches do not fit the grids"
        merges = [self._config.merge_size] * len(grids) if merges is None else merges
        how = Products(deterministic, changes if changes is not None and changes.tower else None)
        pieces = patches.split_with_sizes(sizes)
        encoded: list[torch.Tensor] = [patches] * len(grids)
        for merge in sorted(set(merges)):
            chosen = [index for index, picture_merge in enumerate(merges) if picture_merge == merge]
            group = [(pieces[index], grids[index]) for index in chosen]
            for index, rows in zip(chosen, self._encode(group, merge, how), strict=True):
                encoded[index] = rows
        return encoded

    def fixed(self, most: int) -> None:
        """Implement `Tower.fixed`."""

    def _encode(
        self, pictures: list[tuple[torch.Tensor, Grid]], merge: int, how: Products
    ) -> tuple[torch.Tensor, ...]:
        tables = [self._grid_tensors(*grid[1:], merge) for _, grid in pictures]
        orders, positions = zip(*tables, strict=True)
        ordered = [picture[order] for (picture, _), order in zip(pictures, orders, strict=True)]
        sizes = [len(picture) for picture in ordered]
        pixels = torch.cat(ordered).to(self._device, self._dtype)
        x = how(self._patch_embed, pixels, plus=torch.cat(positions))
        lengths = sizes
        for index, block in enumerate(self._blocks):
            x = self._attend(block.attention, x, lengths, how)
            x = self._feed(block.mlp, x, x, "gelu_tanh", how)
            if merge == 4 and index == self._config.merged_layer:
                x = self._merge_windows(x, how)
                lengths = [size // _WINDOW for size in sizes]
        x = layer_norm(x, self._last_norm).view(-1, _WINDOW * self._config.hidden_size)
        merged = self._feed(self._merger, x, None, "gelu", how)
        return merged.split_with_sizes([size // merge**2 for size in sizes])

    def _merge_windows(self, x: torch.Tensor, how: Products) -> torch.Tensor:
        """Reduce `[n, hidden]` to `[n / 4, hidden]`: attention within each window, then its
        merger."""
        attention, mlp = self._window
        x = self._attend(attention, x, [_WINDOW] * (len(x) // _WINDOW), how)
        windows = x.view(-1, _WINDOW, self._config.hidden_size)
        return self._feed(mlp, windows.flatten(1), windows.mean(1), "gelu_tanh", how)

    def _attend(
        self, part: _Attention, x: torch.Tensor, sizes: list[int], how: Products
    ) -> torch.Tensor:
        qkv = how(part.qkv, layer_norm(x, part.norm))
        qkv = qkv.view(len(x), 3, self._config.heads, -1)
        mixed = attend(qkv[:, :2], qkv[:, 2], sizes).view(len(x), -1)
        return how(part.out, mixed, plus=x)

    def _feed(
        self,
        part: _Mlp,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        activation: Literal["gelu", "gelu_tanh"],
        how: Products,
    ) -> torch.Tensor:
        normed = layer_norm(x, part.norm)
        return how(part.narrow, how(part.wide, normed, activation=activation), plus=residual)

    def _compute_grid_tensors(
        self, height: int, width: int, merge: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order of the patches, and their positions."""
        assert merge in (2, 4) and height % merge == width % merge == 0, "a grid of whole tokens"
        order = nested_order(height, width, merge)
        places = nearest_positions(height, width, self._config.side)[order]
        return order, self._positions[places.to(self._device)]


class _Reader(TowerReader):
    """Names and shapes of the tower's tensors."""

    def __init__(self, source: Loader, prefix: str, config: WindowVisionSpec) -> None:
        super().__init__(source, prefix)
        self._config = config

    def positions(self) -> torch.Tensor:
        name = "vision_tower.embeddings.position_embedding.weight"
        return self.tensor(name, self._config.side**2, self._config.hidden_size)

    def patch_embed(self) -> Linear:
        """Load a convolution whose stride equals its kernel, as a projection of flattened
        patches."""
        config = self._config
        kernel = (config.in_channels, config.patch_size, config.patch_size)
        name = "vision_tower.embeddings.patch_embedding"
        return self.projection(name, config.hidden_size, *kernel)

    def block(self, index: int) -> _Block:
        name = f"vision_tower.encoder.layers.{index}"
        hidden, wide = self._config.hidden_size, self._config.intermediate_size
        mlp = _Mlp(
            self.norm(f"{name}.layer_norm2", hidden),
            self.projection(f"{name}.mlp.fc1", wide, hidden),
            self.projection(f"{name}.mlp.fc2", hidden, wide),
        )
        return _Block(self._attention(name), mlp)

    def window(self) -> tuple[_Attention, _Mlp]:
        name, config = "vision_tower.vit_merger", self._config
        wide = _WINDOW * config.intermediate_size
        return self._attention(name), self._merging(name, wide, config.hidden_size)

    def merger(self) -> _Mlp:
        config = self._config
        return self._merging("merger.mlp.0", _WINDOW * config.hidden_size, config.out_hidden_size)

    def _merging(self, name: str, wide: int, out: int) -> _Mlp:
        flat = _WINDOW * self._config.hidden_size
        return _Mlp(
            self.norm(f"{name}.pre_norm", flat),
            self.projection(f"{name}.linear_1", wide, flat),
            self.projection(f"{name}.linear_2", out, wide),
        )

    def _attention(self, name: str) -> _Attention:
        hidden = self._config.hidden_size
        parts = [f"{name}.self_attn.{projection}_proj" for projection in "qkv"]
        return _Attention(
            self.norm(f"{name}.layer_norm1", hidden),
            self.fused(parts, hidden, hidden),
            self.projection(f"{name}.self_attn.out_proj", hidden, hidden),
        )
