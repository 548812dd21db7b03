"""The vision tower: patches of pictures and video frames to embeddings of the language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.segment_attention import segment_attention
from vlm_serve.models.compiled_tower import CompiledTower
from vlm_serve.models.parts.base import Loader
from vlm_serve.models.program import UnsupportedError
from vlm_serve.models.vision_parts import (
    GridMemory,
    Merger,
    Products,
    Reader,
    VisionBlock,
    attend,
    axial_frequencies,
    block_order,
    interpolate_positions,
    layer_norm,
)

Grid = tuple[int, int, int]
"""(1, h, w): one temporal patch, in patches."""
Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of every picture to itself: queries and keys `[n, 2, heads, d]`, values `[n, heads, d]`
to `[n, heads, d]`."""


@dataclass(frozen=True)
class VisionSpec:
    """The tower of Qwen. `num_positions` is a square: the learned grid of position embeddings.
    `deepstack` lists layers, ascending. A merger behind each of them produces features, which are
    added to the residual behind the decoder's first layers, one after the other."""

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
    def anchor(self) -> str:
        """The name of one of its tensors."""
        return "patch_embed.proj.weight"

    @property
    def layers(self) -> str:
        """Prefix of the names of its layers' tensors."""
        return "blocks."

    @property
    def patch_dim(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def has_fixed_form(self) -> bool:
        """Implement `Vision.has_fixed_form`."""
        return True

    def load(self, source: Loader, prefix: str, dtype: torch.dtype) -> VisionTower:
        """Implement `Vision.load`."""
        return VisionTower(self, source, prefix, dtype)


class VisionTower:
    """The tower of Qwen3-VL and Qwen3.5 (transformers' Qwen3VLVisionModel): attention within one
    temporal patch, interpolated absolute positions, axial rotary embedding, 2x2 mergers.

    Args:
        config: sizes.
        source: of the tensors.
        prefix: of their names.
        dtype: of activations.
    """

    def __init__(self, config: VisionSpec, source: Loader, prefix: str, dtype: torch.dtype) -> None:
        self._config = config
        self._device = source.device
        self._dtype = dtype
        reader = _Reader(source, prefix, config)
        self._patch_embed = reader.patch_embed()
        self._positions = reader.positions()
        self._blocks = tuple(reader.block(index) for index in range(config.depth))
        self._merger = reader.merger("merger", late=False)
        self._deepstack = tuple(
            reader.merger(f"deepstack_merger_list.{index}", late=True)
            for index in range(len(config.deepstack))
        )
        self._mergers = dict(zip(config.deepstack, self._deepstack, strict=True))
        head_dim = config.hidden_size // config.heads
        self._inv_freq = axial_frequencies(head_dim, config.rope_theta)
        self._compiled = self._compile()
        self._grid_tensors = GridMemory(self._compute_grid_tensors)
        self._turns = GridMemory(self._compute_turns)

    def _compile(self) -> CompiledTower | None:
        """Return the compiled tower; None if compiled code is off or does not support it."""
        config = self._config
        try:
            return CompiledTower(
                self._blocks,
                self._merger,
                self._mergers,
                dtype=self._dtype,
                hidden=config.hidden_size,
                heads=config.heads,
                merge=config.merge_size,
                inv_freq=self._inv_freq,
            )
        except UnsupportedError:
            return None

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
            grids: (1, h, w) of each, in patches.
            merges: patches per side that become one token, of each; always the config's.
            deterministic: equal to the last bit, not only in value.
            changes: the adapter of all of them.

        Returns:
            `[h * w / merge**2, embedding_width]` in the model's dtype for each grid: embeddings,
            then features of every deepstack layer.
        """
        sizes = [height * width for _, height, width in grids]
        assert set(merges or ()) <= {self._config.merge_size}, "this tower merges in one way"
        assert all(frames == 1 for frames, _, _ in grids), "one temporal patch per grid"
        assert patches.shape == (sum(sizes), self._config.patch_dim), "patches do not fit the grids"
        if not grids:
            return []
        tables = [self._grid_tensors(height, width) for _, height, width in grids]
        embedded, places = tables[0]
        if len(tables) > 1:
            embedded = torch.cat([each for each, _ in tables])
            places = torch.cat([each for _, each in tables], dim=1)
        patches = patches.to(self._device, self._dtype)
        how = Products(deterministic, changes if changes is not None and changes.tower else None)
        x = how(self._patch_embed, patches, plus=embedded)
        if self._compiled is not None:
            merged = self._compiled.run(x, places, sizes, how.changes)
        else:
            turns = torch.cat([self._turns(*grid[1:]) for grid in grids], dim=1)
            merged = self._by_ops(x, turns, partial(attend, sizes=sizes), how)
        rows = [size // self._config.merge_size**2 for size in sizes]
        return list(torch.split_with_sizes(merged, rows))

    def fixed(self, most: int) -> FixedTower:
        """Implement `Tower.fixed`."""
        patches = torch.zeros(most, self._config.patch_dim, dtype=self._dtype, device=self._device)
        return FixedTower(self, self._config, patches)

    def prepared(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a grid's position embeddings `[n, hidden]`, and its turns: float32 `[2, n,
        head_dim / 2]`, cosines and sines of its angles."""
        return self._grid_tensors(height, width)[0], self._turns(height, width)

    @torch.inference_mode()
    def run(
        self,
        patches: torch.Tensor,
        positions: torch.Tensor,
        turns: torch.Tensor,
        attention: Attend,
    ) -> torch.Tensor:
        """Embed packed patches with all their inputs on the device, op by op.

        Args:
            patches: `[n, patch_dim]` in the dtype of activations.
            positions, turns: of these patches, see `prepared`.
            attention: of every picture to itself, see `attend`.

        Returns:
            `[n / merge**2, embedding_width]`, as from `encode`.
        """
        how = Products(deterministic=False)
        x = how(self._patch_embed, patches, plus=positions)
        return self._by_ops(x, turns, attention, how)

    def _by_ops(
        self, x: torch.Tensor, turns: torch.Tensor, attention: Attend, how: Products
    ) -> torch.Tensor:
        # [n, 1, 1, d]: the same angles for queries, keys and every head.
        cos, sin = turns[:, :, None, None]
        features = []
        for index, block in enumerate(self._blocks):
            x = self._attention(block, x, (cos, sin), attention, how)
            x = self._mlp(block, x, how)
            if index in self._mergers:
                features.append(self._merge(self._mergers[index], x, how))
        merged = self._merge(self._merger, x, how)
        return torch.cat([merged, *features], dim=1) if features else merged

    def _attention(
        self,
        block: VisionBlock,
        x: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        attention: Attend,
        how: Products,
    ) -> torch.Tensor:
        tokens, heads = x.shape[0], self._config.heads
        qkv = how(block.qkv, layer_norm(x, block.norm1))
        qkv = qkv.view(tokens, 3, heads, -1)
        mixed = attention(_rotate(qkv[:, :2], *turns), qkv[:, 2]).view(tokens, -1)
        return how(block.proj, mixed, plus=x)

    def _mlp(self, block: VisionBlock, x: torch.Tensor, how: Products) -> torch.Tensor:
        hidden = how(block.fc1, layer_norm(x, block.norm2), activation="gelu_tanh")
        return how(block.fc2, hidden, plus=x)

    def _merge(self, merger: Merger, x: torch.Tensor, how: Products) -> torch.Tensor:
        shape = (x.shape[0] // self._config.merge_size**2, -1)
        late = merger.late
        normed = layer_norm(x.view(shape) if late else x, merger.norm).view(shape)
        return how(merger.fc2, how(merger.fc1, normed, activation="gelu"))

    def _compute_grid_tensors(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position embeddings of a grid's patches, and int64 `[2, n]` rows and columns."""
        merge = self._config.merge_size
        positions = interpolate_positions(self._positions, height, width, merge)
        return positions, torch.stack(block_order(height, width, merge))

    def _compute_turns(self, height: int, width: int) -> torch.Tensor:
        """Return float32 `[2, n, head_dim / 2]`, cosines and sines of a grid's angles."""
        places = block_order(height, width, self._config.merge_size)
        angles = torch.cat([axis.float()[:, None] * self._inv_freq for axis in places], dim=1)
        return torch.stack([angles.cos(), angles.sin()]).to(self._device)


class FixedTower:
    """A tower over inputs at fixed addresses, for captured runs. Its attention reads the bounds of
    pictures from a table on the device.

    Args:
        tower: embeds patches.
        config: its sizes.
        patches: `[most, patch_dim]`, written by `fill`.

    Attributes:
        area, heads, head_dim: see `FixedTower` of models/spec.py.
    """

    def __init__(self, tower: VisionTower, config: VisionSpec, patches: torch.Tensor) -> None:
        self._tower, self._patches = tower, patches
        self.area, self.heads = config.merge_size**2, config.heads
        self.head_dim = config.hidden_size // config.heads
        most = len(patches)
        self._positions = patches.new_zeros(most, config.hidden_size)
        self._turns = patches.new_zeros(2, most, self.head_dim // 2, dtype=torch.float32)

    @torch.inference_mode()
    def fill(self, patches: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> None:
        """Implement `FixedTower.fill` of models/spec.py."""
        self._patches[: len(patches)].copy_(patches)
        begin = 0
        for _, height, width in grids:
            own = slice(begin, begin + height * width)
            self._positions[own], self._turns[:, own] = self._tower.prepared(height, width)
            begin = own.stop

    def run(self, size: int, tiles: torch.Tensor) -> torch.Tensor:
        """Implement `FixedTower.run` of models/spec.py."""

        def attend(qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return segment_attention(qk[:, 0], qk[:, 1], v, tiles, scale=self.head_dim**-0.5)

        turns = self._turns[:, :size]
        return self._tower.run(self._patches[:size], self._positions[:size], turns, attend)


class _Reader(Reader):
    """Names and shapes of the tower's tensors."""

    def __init__(self, source: Loader, prefix: str, config: VisionSpec) -> None:
        super().__init__(source, prefix)
        self._config = config

    def positions(self) -> torch.Tensor:
        return self.tensor("pos_embed.weight", self._config.num_positions, self._config.hidden_size)

    def patch_embed(self) -> Linear:
        """Load a convolution whose stride equals its kernel, as a projection of flattened
        patches."""
        config = self._config
        kernel = (config.in_channels, config.temporal_patch_size, *[config.patch_size] * 2)
        return self.projection("patch_embed.proj", config.hidden_size, *kernel)

    def merger(self, name: str, *, late: bool) -> Merger:
        merged = self._config.hidden_size * self._config.merge_size**2
        return Merger(
            norm=self.norm(f"{name}.norm", merged if late else self._config.hidden_size),
            fc1=self.projection(f"{name}.linear_fc1", merged, merged),
            fc2=self.projection(f"{name}.linear_fc2", self._config.out_hidden_size, merged),
            late=late,
        )

    def block(self, index: int) -> VisionBlock:
        hidden, wide = self._config.hidden_size, self._config.intermediate_size
        name = f"blocks.{index}"
        return VisionBlock(
            norm1=self.norm(f"{name}.norm1", hidden),
            qkv=self.projection(f"{name}.attn.qkv", 3 * hidden, hidden),
            proj=self.projection(f"{name}.attn.proj", hidden, hidden),
            norm2=self.norm(f"{name}.norm2", hidden),
            fc1=self.projection(f"{name}.mlp.linear_fc1", wide, hidden),
            fc2=self.projection(f"{name}.mlp.linear_fc2", hidden, wide),
        )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `[n, 2, heads, d]` in halves, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
