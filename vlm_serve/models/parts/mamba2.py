"""The Mamba2 mixer: convolution, recurrence with a scalar decay per head, norm of gated rows.

Numerics follow transformers' NemotronHMamba2Mixer and GraniteMoeHybridMambaLayer, but for the
limits of a step's length: there only prefill keeps to them, here decoding does too, so that states
do not depend on who computed them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vlm_serve.kernels.causal_conv import (
    causal_conv_decode,
    causal_conv_prefill,
    causal_conv_verify,
    fold_tails,
)
from vlm_serve.kernels.causal_conv.reference import Behind
from vlm_serve.kernels.gated_delta import (
    chunk_gated_delta,
    fold_gated_delta,
    recurrent_gated_delta,
    step_lengths,
    verify_gated_delta,
)
from vlm_serve.kernels.gated_delta.compiled import STATE_TYPES
from vlm_serve.kernels.linear import Linear, Part
from vlm_serve.kernels.metadata import AnyMeta, DecodeMeta, VerifyMeta
from vlm_serve.kernels.norms import Normed, gated_rms_norm, gated_squares
from vlm_serve.kernels.ranks import Ranks
from vlm_serve.models.cache_layout import Pool
from vlm_serve.models.parts.base import LoadedMixer, Mixer, Norm, OutputProjection, Step, rows_of
from vlm_serve.models.parts.gated_delta import (
    StateLayer,
    state_layer,
    state_pools,
    updates_record,
)
from vlm_serve.models.program import Program, UnsupportedError
from vlm_serve.models.weights import Weights

_EXACT = torch.float32


@dataclass(frozen=True, slots=True)
class Mamba2(Mixer):
    """Sizes. Heads of a group share B and C, `[state_dim]` each, and the mean of the norm. `limits`
    are those of a step's length, `bias`: both projections have one. `name` is the prefix of its
    tensors' names within a layer."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    limits: tuple[float, float] = (0.0, math.inf)
    bias: bool = False
    conv_bias: bool = True
    name: str = "mamba"

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.values + 2 * self.groups * self.state_dim

    @property
    def values(self) -> int:
        """Channels before the output projection."""
        return self.heads * self.head_dim

    def pools(self) -> tuple[Pool, ...]:
        keys, values = (self.groups, self.state_dim), (self.heads, self.head_dim)
        return state_pools(keys, values, self.taps)

    def heads_to_split(self) -> Mapping[str, int]:
        return {"Mamba2 heads": self.heads}

    def heads_to_repeat(self) -> Mapping[str, int]:
        # Ranks that share a group's heads have copies of its B and C each.
        return {"groups of Mamba2 heads": self.groups}

    def load(self, source: Weights, layer: str, hidden: int, norm: Norm) -> LoadedMamba2:
        name, heads, mixed = f"{layer}.{self.name}", self.heads, self._mixed(source.ranks)
        share, groups = source.ranks.share(heads), source.ranks.share_or_copy(self.groups)
        (values,) = rows_of(share, self.head_dim)
        wide, total = f"{name}.in_proj", self.values + self.channels + heads
        first = self.values + self.channels
        rows = (
            (values, *(range(self.values + own.start, self.values + own.stop) for own in mixed)),
            (range(first + share.start, first + share.stop),),
        )
        conv, out = f"{name}.conv1d", f"{name}.out_proj"
        taps = source.tensor(f"{conv}.weight", (self.channels, 1, self.taps), mixed)
        factors = source.tensor(f"{name}.norm.weight", (self.values,), (values,), _EXACT)
        exact = {
            kind: source.tensor(f"{name}.{kind}", (heads,), (share,), _EXACT)
            for kind in ("A_log", "dt_bias", "D")
        }
        return LoadedMamba2(
            sizes=replace(self, heads=len(share), groups=len(groups)),
            in_proj=source.linear(
                Part(f"{wide}.weight", (total, hidden), rows[0], least_bits=4),
                Part(f"{wide}.weight", (total, hidden), rows[1]),
                bias=[Part(f"{wide}.bias", (total,), own) for own in rows] if self.bias else None,
            ),
            conv=taps.squeeze(1),
            behind=Behind(
                source.tensor(f"{conv}.bias", (self.channels,), mixed) if self.conv_bias else None
            ),
            neg_decay=-exact["A_log"].exp(),
            dt_bias=exact["dt_bias"],
            skip=exact["D"],
            norm=factors.view(len(groups), -1),
            out_proj=OutputProjection.load(
                source,
                Part(f"{out}.weight", (hidden, self.values), least_bits=4),
                Part(f"{out}.bias", (hidden,)) if self.bias else None,
            ),
            eps=norm.eps,
            sharers=max(1, source.ranks.size // self.groups),
        )

    def _mixed(self, ranks: Ranks) -> tuple[range, ...]:
        """Return a rank's channels of the convolution: its x, B and C among all."""
        (values,) = rows_of(ranks.share(self.heads), self.head_dim)
        (keys,) = rows_of(ranks.share_or_copy(self.groups), self.state_dim)
        width = self.groups * self.state_dim
        return (
            values,
            range(self.values + keys.start, self.values + keys.stop),
            range(self.values + width + keys.start, self.values + width + keys.stop),
        )


@dataclass(frozen=True, slots=True)
class LoadedMamba2(LoadedMixer):
    """One product, `in_proj`, computes the gate z, x, B, C and the steps' lengths, in this order.
    `sharers`: adjacent ranks that share the heads of each group."""

    sizes: Mamba2
    in_proj: Linear
    conv: torch.Tensor
    behind: Behind
    neg_decay: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor
    out_proj: OutputProjection
    eps: float
    sharers: int

    def bind(self, pools: Mapping[str, torch.Tensor]) -> StateLayer:
        return state_layer(pools)

    def apply(
        self,
        x: Normed,
        residual: torch.Tensor,
        cache: StateLayer,
        step: Step,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        sizes = self.sizes
        wide = self.in_proj.of_norm(x, deterministic=step.deterministic, changes=step.changes)
        z, mixed, raw = wide.split_with_sizes((sizes.values, sizes.channels, sizes.heads), 1)
        lengths, decay = step_lengths(raw, self.neg_decay, self.dt_bias, sizes.limits)
        parts = [
            self._scanned(mixed[rows], decay[rows], lengths[rows], cache, meta)
            for meta, rows in step.parts()
        ]
        core = parts[0] if len(parts) == 1 else torch.cat(parts)
        if keep is not None:
            core, z, residual = core[keep], z[keep], residual[keep]
        core, z = core.view(-1, *self.norm.shape), z.view(-1, *self.norm.shape)
        mean = None
        if self.sharers > 1:
            mean = self._mean_squares(core, z)
        out = gated_rms_norm(core, z, self.norm, self.eps, gate_first=True, mean=mean)
        return self.out_proj(out.view(-1, sizes.values), residual, step.kept(keep))

    def _mean_squares(self, core: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the mean squares of the gated rows of this rank's group, float32 `[T, 1]`."""
        ranks = self.out_proj.ranks
        group = slice(ranks.rank // self.sharers, ranks.rank // self.sharers + 1)
        sums = torch.zeros(len(core), ranks.size // self.sharers, device=core.device)
        sums[:, group] = gated_squares(core, z)
        return ranks.sum(sums)[:, group] / (self.sharers * core.shape[-1])

    def _scanned(
        self,
        mixed: torch.Tensor,
        decay: torch.Tensor,
        lengths: torch.Tensor,
        cache: StateLayer,
        meta: AnyMeta,
    ) -> torch.Tensor:
        """Convolve one kind of tokens and run the recurrence over them."""
        conv, behind, updates = self.conv, self.behind, cache.updates
        if isinstance(meta, DecodeMeta):
            tokens = self._tokens(causal_conv_decode(mixed, conv, cache.conv, meta, behind))
            return recurrent_gated_delta(
                *tokens, decay, lengths, cache.recurrent, meta, skip=self.skip
            )
        if isinstance(meta, VerifyMeta):
            assert updates is not None, "no pools for updates"
            tokens = self._tokens(
                causal_conv_verify(mixed, conv, cache.conv, updates.inputs, meta, behind)
            )
            return verify_gated_delta(
                *tokens, decay, lengths, cache.recurrent, updates, meta, skip=self.skip
            )
        tokens = self._tokens(causal_conv_prefill(mixed, conv, cache.conv, meta, behind))
        return chunk_gated_delta(*tokens, decay, lengths, cache.recurrent, meta, skip=self.skip)

    def _tokens(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return C, B and x of convolved channels, `[N, groups or heads, dim]` views."""
        sizes = self.sizes
        width = sizes.groups * sizes.state_dim
        x, b, c = mixed.split_with_sizes((sizes.values, width, width), 1)
        shape = (len(mixed), sizes.groups, sizes.state_dim)
        return c.view(shape), b.view(shape), x.view(len(mixed), sizes.heads, sizes.head_dim)

    def fold(self, cache: StateLayer, folds: Sequence[tuple[int, int, int]]) -> None:
        assert cache.updates is not None, "no pools for updates"
        fold_tails(cache.conv, cache.updates.inputs, folds)
        fold_gated_delta(cache.recurrent, cache.updates, folds)

    def lower(self, program: Program, cache: StateLayer, *, last: bool) -> None:
        sizes = self.sizes
        program.check_whole(mamba_head_dim=sizes.head_dim, mamba_state_dim=sizes.state_dim)
        if cache.recurrent.dtype not in STATE_TYPES:
            raise UnsupportedError(f"states in {cache.recurrent.dtype}")
        wide = program.view("wide", self.in_proj.columns)
        mixed = program.view("convolved", sizes.channels)
        core = program.view("mixed", sizes.values)
        program.product(self.in_proj, program.normed, wide)
        inputs = None if cache.updates is None else cache.updates.inputs
        x = wide.at(sizes.values)
        program.convolution(self.conv, self.behind, x, mixed, cache.conv, inputs)
        low, high = sizes.limits
        program.emit(
            "Scan",
            x=mixed,
            raw=wide.at(sizes.values + sizes.channels),
            out=core,
            heads=sizes.heads,
            groups=sizes.groups,
            state_dim=sizes.state_dim,
            head_dim=sizes.head_dim,
            state_stride=cache.recurrent.stride(0),
            state_type=STATE_TYPES[cache.recurrent.dtype],
            neg_decay=program.vector(self.neg_decay),
            dt_bias=program.vector(self.dt_bias),
            skip=program.vector(self.skip),
            states=cache.recurrent.data_ptr(),
            low=low,
            high=high,
            **updates_record(cache),
        )
        groups, width = self.norm.shape
        program.emit(
            "GateNorm",
            x=core,
            gate=wide,
            out=core,
            groups=groups,
            width=width,
            sharers=self.sharers,
            factors=program.vector(self.norm),
            eps=self.eps,
        )
        if last:
            program.keep(core, sizes.values)
        self.out_proj.lower(program, core)
