"""The short-convolution mixer: a causal convolution between two products by element.

Numerics follow transformers' Lfm2ShortConv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vlm_serve.kernels.causal_conv import (
    causal_conv_decode,
    causal_conv_prefill,
    causal_conv_verify,
    fold_tails,
)
from vlm_serve.kernels.causal_conv.reference import Behind
from vlm_serve.kernels.linear import Linear, Part
from vlm_serve.kernels.metadata import AnyMeta, DecodeMeta, VerifyMeta
from vlm_serve.kernels.norms import Normed
from vlm_serve.models.cache_layout import Pool
from vlm_serve.models.parts.base import (
    LoadedMixer,
    Mixer,
    Norm,
    OutputProjection,
    Step,
)
from vlm_serve.models.program import Program
from vlm_serve.models.weights import Weights


@dataclass(frozen=True, slots=True)
class ShortConv(Mixer):
    """`out(c * conv(b * x))`, where one projection computes b, c and x of all channels. `bias`: the
    convolution and both projections have one. `name` is the prefix of its tensors' names within a
    layer."""

    channels: int
    taps: int
    bias: bool = False
    name: str = "conv"

    def pools(self) -> tuple[Pool, ...]:
        # Tails are the oldest input first; an update is the input of a drafted token.
        return (
            Pool("conv", "inputs", "row", (self.channels, self.taps - 1), split=0),
            Pool("update_inputs", "inputs", "update", (self.channels,), split=0),
        )

    def heads_to_split(self) -> Mapping[str, int]:
        return {"channels of the convolution": self.channels}

    def load(self, source: Weights, layer: str, hidden: int, norm: Norm) -> LoadedShortConv:
        name, size, share = f"{layer}.{self.name}", self.channels, source.ranks.share(self.channels)
        rows = tuple(range(at + share.start, at + share.stop) for at in (0, size, 2 * size))
        wide, out = f"{name}.in_proj", f"{name}.out_proj"
        taps = source.tensor(f"{name}.conv.weight", (size, 1, self.taps), (share,))
        biases = (
            [Part(f"{wide}.bias", (3 * size,), rows)] if self.bias else None,
            source.tensor(f"{name}.conv.bias", (size,), (share,)) if self.bias else None,
            Part(f"{out}.bias", (hidden,)) if self.bias else None,
        )
        return LoadedShortConv(
            channels=len(share),
            in_proj=source.linear(
                Part(f"{wide}.weight", (3 * size, hidden), rows, least_bits=4), bias=biases[0]
            ),
            conv=taps.squeeze(1),
            behind=Behind(biases[1], silu=False),
            out_proj=OutputProjection.load(
                source, Part(f"{out}.weight", (hidden, size), least_bits=4), biases[2]
            ),
        )


@dataclass(frozen=True, slots=True)
class ShortConvLayer:
    """A layer's view of the state rows, `[rows, channels, taps - 1]`, and of the inputs of updates,
    `[updates, channels]`, if they have a pool."""

    tails: torch.Tensor
    inputs: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoadedShortConv(LoadedMixer):
    """One product, `in_proj`, computes b, c and x, in this order."""

    channels: int
    in_proj: Linear
    conv: torch.Tensor
    behind: Behind
    out_proj: OutputProjection

    def bind(self, pools: Mapping[str, torch.Tensor]) -> ShortConvLayer:
        return ShortConvLayer(pools["conv"], pools.get("update_inputs"))

    def apply(
        self,
        x: Normed,
        residual: torch.Tensor,
        cache: ShortConvLayer,
        step: Step,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        wide = self.in_proj.of_norm(x, deterministic=step.deterministic, changes=step.changes)
        b, c, value = torch.split_with_sizes(wide, [self.channels] * 3, 1)
        inputs = b * value
        parts = [self._convolved(inputs[rows], cache, meta) for meta, rows in step.parts()]
        out = c * (parts[0] if len(parts) == 1 else torch.cat(parts))
        if keep is not None:
            out, residual = out[keep], residual[keep]
        return self.out_proj(out, residual, step.kept(keep))

    def _convolved(self, x: torch.Tensor, cache: ShortConvLayer, meta: AnyMeta) -> torch.Tensor:
        """Convolve one kind of tokens."""
        if isinstance(meta, DecodeMeta):
            return causal_conv_decode(x, self.conv, cache.tails, meta, self.behind)
        if isinstance(meta, VerifyMeta):
            assert cache.inputs is not None, "no pool for updates"
            return causal_conv_verify(x, self.conv, cache.tails, cache.inputs, meta, self.behind)
        return causal_conv_prefill(x, self.conv, cache.tails, meta, self.behind)

    def fold(self, cache: ShortConvLayer, folds: Sequence[tuple[int, int, int]]) -> None:
        assert cache.inputs is not None, "no pool for updates"
        fold_tails(cache.tails, cache.inputs, folds)

    def lower(self, program: Program, cache: ShortConvLayer, *, last: bool) -> None:
        program.check_whole(**{"channels of the convolution": self.channels})
        wide = program.view("wide", self.in_proj.columns)
        mixed = program.view("mixed", self.channels)
        program.product(self.in_proj, program.normed, wide)
        program.convolution(self.conv, self.behind, wide, mixed, cache.tails, cache.inputs)
        if last:
            program.keep(mixed, self.channels)
        self.out_proj.lower(program, mixed)
