"""The vision tower: patches of pictures and video frames to embeddings of the language model."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.linear.low_rank import AdapterChanges, RowChanges
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.native_library import call, load
from vlm_serve.kernels.native_records import LANES
from vlm_serve.kernels.rope.halves import rotate_halves
from vlm_serve.kernels.segment_attention import segment_attention
from vlm_serve.models.compiled_step import StepChanges
from vlm_serve.models.program import Program, UnsupportedError, View
from vlm_serve.models.spec import Vision
from vlm_serve.models.vision_parts import (
    EPS,
    Affine,
    Attend,
    AttentionPart,
    GridMemory,
    Merger,
    MlpPart,
    Products,
    TowerReader,
    VisionBlock,
    attend,
    axial_frequencies,
    block_order,
    interpolate_positions,
    layer_norm,
)
from vlm_serve.models.weights import Weights

Grid = tuple[int, int, int]
"""(1, h, w): one temporal patch, in patches."""


_Step = struct("Step")
_MAX_DIM = constant("MAX_DIM")


@dataclass(frozen=True, kw_only=True)
class VisionSpec(Vision):
    """The tower of Qwen. `num_positions` is a square: the learned grid of position embeddings.
    `deepstack` lists layers, ascending. A merger behind each of them produces features, which are
    added to the residual behind the decoder's first layers, one after the other. `omni`: the
    mergers' tensors have the names of Qwen3-Omni's."""

    anchor = "patch_embed.proj.weight"
    layers = "blocks."
    has_fixed_form = True

    num_positions: int
    rope_theta: float
    omni: bool = False

    def load(self, source: Weights, prefix: str, dtype: torch.dtype) -> VisionTower:
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

    def __init__(
        self, config: VisionSpec, source: Weights, prefix: str, dtype: torch.dtype
    ) -> None:
        self._config = config
        self._device = source.device
        self._dtype = dtype
        reader = _Reader(source, prefix, config)
        self._patch_embed = reader.patch_embed()
        self._positions = reader.positions()
        self._blocks = tuple(reader.block(index) for index in range(config.depth))
        self._merger = reader.merger("merger", postshuffle=False)
        self._deepstack = tuple(
            reader.merger(f"{reader.late}.{index}", postshuffle=True)
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
            embedded = torch.cat([embedding for embedding, _ in tables])
            places = torch.cat([place for _, place in tables], dim=1)
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

    def fixed(self, most: int) -> FixedVisionTower:
        """Implement `Tower.fixed`."""
        patches = torch.zeros(most, self._config.patch_dim, dtype=self._dtype, device=self._device)
        return FixedVisionTower(self, self._config, patches)

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
        features = []
        heads = self._config.heads

        def attend_turned(qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(rotate_halves(qk, turns), v)

        for index, block in enumerate(self._blocks):
            x = block.attention(x, heads, attend_turned, how)
            x = block.mlp(x, "gelu_tanh", how, plus=x)
            if index in self._mergers:
                features.append(self._merge(self._mergers[index], x, how))
        merged = self._merge(self._merger, x, how)
        return torch.cat([merged, *features], dim=1) if features else merged

    def _merge(self, merger: Merger, x: torch.Tensor, how: Products) -> torch.Tensor:
        shape = (x.shape[0] // self._config.merge_size**2, -1)
        mlp = merger.mlp
        normed = layer_norm(x.view(shape) if merger.postshuffle else x, mlp.norm).view(shape)
        return mlp.of_normed(normed, "gelu", how)

    def _compute_grid_tensors(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position embeddings of a grid's patches, and float64 `[2, n]` rows and columns."""
        merge = self._config.merge_size
        positions = interpolate_positions(self._positions, height, width, merge)
        return positions, torch.stack(block_order(height, width, merge)).double()

    def _compute_turns(self, height: int, width: int) -> torch.Tensor:
        """Return float32 `[2, n, head_dim / 2]`, cosines and sines of a grid's angles."""
        places = block_order(height, width, self._config.merge_size)
        angles = torch.cat([axis.float()[:, None] * self._inv_freq for axis in places], dim=1)
        return torch.stack([angles.cos(), angles.sin()]).to(self._device)


class FixedVisionTower:
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
            picture = slice(begin, begin + height * width)
            self._positions[picture], self._turns[:, picture] = self._tower.prepared(height, width)
            begin = picture.stop

    def run(self, size: int, tiles: torch.Tensor) -> torch.Tensor:
        """Implement `FixedTower.run` of models/spec.py."""

        def attend(qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return segment_attention(qk[:, 0], qk[:, 1], v, tiles, scale=self.head_dim**-0.5)

        turns = self._turns[:, :size]
        return self._tower.run(self._patches[:size], self._positions[:size], turns, attend)


class _Reader(TowerReader):
    """Names and shapes of the tower's tensors."""

    def __init__(self, source: Weights, prefix: str, config: VisionSpec) -> None:
        super().__init__(source, prefix)
        self._config = config
        self.late = "merger_list" if config.omni else "deepstack_merger_list"

    def positions(self) -> torch.Tensor:
        return self.tensor("pos_embed.weight", self._config.num_positions, self._config.hidden_size)

    def patch_embed(self) -> Linear:
        """Load a convolution whose stride equals its kernel, as a projection of flattened
        patches."""
        config = self._config
        kernel = (config.in_channels, config.temporal_patch_size, *[config.patch_size] * 2)
        return self.projection("patch_embed.proj", config.hidden_size, *kernel)

    def merger(self, name: str, *, postshuffle: bool) -> Merger:
        merged = self._config.hidden_size * self._config.merge_size**2
        norm, wide, narrow = "norm", "linear_fc1", "linear_fc2"
        if self._config.omni:
            norm, wide, narrow = "ln_q", "mlp.0", "mlp.2"
        return Merger(
            MlpPart(
                self.norm(f"{name}.{norm}", merged if postshuffle else self._config.hidden_size),
                self.projection(f"{name}.{wide}", merged, merged),
                self.projection(f"{name}.{narrow}", self._config.out_hidden_size, merged),
            ),
            postshuffle,
        )

    def block(self, index: int) -> VisionBlock:
        hidden, wide = self._config.hidden_size, self._config.intermediate_size
        name = f"blocks.{index}"
        return VisionBlock(
            AttentionPart(
                self.norm(f"{name}.norm1", hidden),
                self.projection(f"{name}.attn.qkv", 3 * hidden, hidden),
                self.projection(f"{name}.attn.proj", hidden, hidden),
            ),
            MlpPart(
                self.norm(f"{name}.norm2", hidden),
                self.projection(f"{name}.mlp.linear_fc1", wide, hidden),
                self.projection(f"{name}.mlp.linear_fc2", hidden, wide),
            ),
        )


class CompiledTower:
    """Runs the blocks and mergers of a tower, as one call into `native/step.cpp`.

    A patch's bits depend on its own picture alone. A small picture takes a hundred short
    operations. Each one releases the interpreter lock and waits to acquire it again. Between
    threads that are busy in Python, that takes far longer than the work.

    Args:
        blocks, merger: weights.
        deepstack: mergers of features, by the index of the block before them.
        dtype: of activations.
        hidden, heads: of the blocks.
        merge: patches per side of a square that becomes one token.
        inv_freq: float32 `[head_dim / 4]`, the rotary embedding's frequencies of each axis.

    Attributes:
        width: of its result, embeddings and features.

    Raises:
        UnsupportedError: a size, dtype or layout that compiled code does not support.
        BuildError: the library can be neither found nor built.
    """

    def __init__(
        self,
        blocks: Sequence[VisionBlock],
        merger: Merger,
        deepstack: Mapping[int, Merger],
        *,
        dtype: torch.dtype,
        hidden: int,
        heads: int,
        merge: int,
        inv_freq: torch.Tensor,
    ) -> None:
        self._program = Program(dtype, hidden)
        self._hidden, self._heads, self._dim = hidden, heads, hidden // heads
        self._area = merge * merge
        if self._dim > _MAX_DIM:
            raise UnsupportedError(f"heads of {self._dim} dims, more than {_MAX_DIM}")
        self.width = merger.mlp.narrow.columns * (1 + len(deepstack))
        axes = torch.arange(2, dtype=torch.int32).repeat_interleave(len(inv_freq))
        self._program.rotate(inv_freq.repeat(2), axes)
        features = 0
        for index, block in enumerate(blocks):
            self._add_attention(block.attention)
            self._add_mlp(block.mlp)
            if index in deepstack:
                features += 1
                self._add_merger(deepstack[index], features)
        self._add_merger(merger, 0)
        self._record, self._bits = self._program.record(), 8 * dtype.itemsize
        load()

    def run(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        sizes: Sequence[int],
        changes: AdapterChanges | None = None,
    ) -> torch.Tensor:
        """Encode pictures one after the other.

        Args:
            x: `[patches, hidden]` embedded patches in the dtype of activations, contiguous.
            positions: float64 `[2, patches]`, row and column of each.
            sizes: patches of each picture.
            changes: the adapter of all of them.

        Returns:
            `[patches / merge**2, width]` in the dtype of activations.

        Raises:
            MemoryError: for pictures that are too large.
        """
        patches = len(x)
        out = torch.empty(patches // self._area, self.width, dtype=x.dtype)
        first_token = array("q", accumulate(sizes, initial=0))
        # Every patch is its own block of keys, in order.
        blocks = array("i", range(patches))
        tables = array("q", (blocks.buffer_info()[0] + 4 * first for first in first_token[:-1]))
        start = array("q", [0]) * len(sizes)
        rows = RowChanges.of_all(changes, patches)
        adapters = None if rows is None else StepChanges(rows)
        step = _Step(
            tokens=patches,
            sequences=len(sizes),
            threads=torch.get_num_threads(),
            x=x.data_ptr(),
            positions=positions.data_ptr(),
            first_token=first_token.buffer_info()[0],
            start=start.buffer_info()[0],
            tables=tables.buffer_info()[0],
            hidden=out.data_ptr(),
            **({} if adapters is None else adapters.fields()),
        )
        call("vlm_step", ctypes.byref(self._record), ctypes.byref(step), self._bits)
        return out

    def _add_attention(self, part: AttentionPart) -> None:
        program, heads, dim = self._program, self._heads, self._dim
        room = -(-dim // LANES) * LANES
        qkv = program.view("wide", 3 * self._hidden)
        turned = program.view("turned", 3 * heads * room)
        mixed = program.view("mixed", heads * room)
        self._add_norm(part.norm, program.residual, self._hidden)
        program.product(part.qkv, program.normed, qkv)
        head_sizes = {"heads": heads, "head_dim": dim, "padded_dim": room}
        program.emit("Turn", x=qkv, cos=program.cos, sin=program.sin, out=turned, **head_sizes)
        program.emit("SeeAll", x=turned, out=mixed, heads=heads, padded_dim=room, scale=dim**-0.5)
        if room != dim:
            program.emit("Narrow", x=mixed, out=program.normed, **head_sizes)
            mixed = program.normed
        program.add(part.out, mixed)

    def _add_mlp(self, part: MlpPart) -> None:
        program = self._program
        wide = program.view("wide", part.wide.columns)
        self._add_norm(part.norm, program.residual, self._hidden)
        program.product(part.wide, program.normed, wide, "STORE_GELU_TANH")
        program.add(part.narrow, wide)

    def _add_merger(self, merger: Merger, place: int) -> None:
        """Write a merger's tokens to its place in the step's rows."""
        program, area, mlp = self._program, self._area, merger.mlp
        merged, columns = area * self._hidden, mlp.narrow.columns
        squares = View(program.normed.buffer, 0, merged)
        wide, out = program.view("wide", merged), program.view("turned", columns)
        if not merger.postshuffle:
            self._add_norm(mlp.norm, program.residual, self._hidden)
        program.emit("Squares", size=area)
        if merger.postshuffle:
            self._add_norm(mlp.norm, View(program.residual.buffer, 0, merged), merged)
        program.product(mlp.wide, squares, wide, "STORE_GELU")
        program.product(mlp.narrow, wide, out)
        at = {"width": columns, "column": place * columns, "stride": self.width}
        program.emit("Hidden", x=out, **at)
        program.emit("Squares", size=1)

    def _add_norm(self, norm: Affine, x: View, width: int) -> None:
        program = self._program
        program.check_whole(width=width)
        assert norm.bias is not None, "a layer norm"
        factors, offsets = program.vector(norm.weight), program.vector(norm.bias)
        out = View(program.normed.buffer, 0, x.stride)
        program.emit(
            "LayerNorm", x=x, out=out, width=width, factors=factors, offsets=offsets, eps=EPS
        )
