"""The Gated DeltaNet mixer: convolution, gated delta rule, gated norm.

Numerics follow transformers' Qwen3_5GatedDeltaNet. Where transformers rounds an intermediate result
to bfloat16 and this code keeps it in a register, ours is more exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vlm_serve.kernels.causal_conv import (
    causal_conv_prefill,
    causal_conv_verify,
    fold_tails,
)
from vlm_serve.kernels.causal_conv.compiled import MAX_TAPS
from vlm_serve.kernels.gated_delta import (
    chunk_gated_delta,
    fold_gated_delta,
    gates,
    verify_gated_delta,
)
from vlm_serve.kernels.gated_delta.compiled import STATE_TYPES
from vlm_serve.kernels.gated_delta.decoding import Mixing, mix_decode
from vlm_serve.kernels.linear import Linear, Part
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, Updates, VerifyMeta
from vlm_serve.kernels.native_layout import constant, struct
from vlm_serve.kernels.norms import Normed, gated_rms_norm
from vlm_serve.kernels.ranks import Ranks
from vlm_serve.models.cache_layout import Pool
from vlm_serve.models.parts.base import (
    LoadedMixer,
    Mixer,
    Norm,
    OutputProjection,
    Step,
    rows_of,
)
from vlm_serve.models.program import Program, UnsupportedError
from vlm_serve.models.weights import Weights

_EXACT = torch.float32
_MAX_SHARED = constant("MAX_SHARED")
"""Most value heads per key head in compiled steps."""


@dataclass(frozen=True, slots=True)
class GatedDelta(Mixer):
    """Sizes. `interleaved`: the checkpoint groups the rows of query, key, value and z by key
    head, and those of b and a. `name` is the prefix of its tensors' names within a layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    interleaved: bool = False
    name: str = "linear_attn"

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Channels before the output projection."""
        return self.value_heads * self.value_dim

    def pools(self) -> tuple[Pool, ...]:
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        return state_pools(keys, values, self.taps)

    def heads_to_split(self) -> Mapping[str, int]:
        return {"linear key heads": self.key_heads, "linear value heads": self.value_heads}

    def load(self, source: Weights, layer: str, hidden: int, norm: Norm) -> LoadedGatedDelta:
        name, heads, ranks = f"{layer}.{self.name}", self.value_heads, source.ranks
        share = ranks.share(heads)
        out = Part(f"{name}.out_proj.weight", (hidden, self.values), least_bits=4)
        conv = source.tensor(
            f"{name}.conv1d.weight", (self.channels, 1, self.taps), self._mixed(ranks)
        )
        return LoadedGatedDelta(
            sizes=replace(self, key_heads=len(ranks.share(self.key_heads)), value_heads=len(share)),
            in_proj=source.linear(*self._input(f"{name}.in_proj_{{}}.weight", hidden, ranks)),
            conv=conv.squeeze(1),
            # Published in float32: in bfloat16 a head would forget up to 1.6 % faster or slower.
            neg_decay=-source.tensor(f"{name}.A_log", (heads,), (share,), _EXACT).exp(),
            dt_bias=source.tensor(f"{name}.dt_bias", (heads,), (share,), _EXACT),
            norm=source.tensor(f"{name}.norm.weight", (self.value_dim,), dtype=_EXACT),
            out_proj=OutputProjection.load(source, out),
            eps=norm.eps,
        )

    def _mixed(self, ranks: Ranks) -> tuple[range, ...]:
        """Return a rank's channels of the convolution: its queries, keys and values among all."""
        (keys,) = rows_of(ranks.share(self.key_heads), self.key_dim)
        (values,) = rows_of(ranks.share(self.value_heads), self.value_dim)
        width = self.key_heads * self.key_dim
        return (
            keys,
            range(width + keys.start, width + keys.stop),
            range(2 * width + values.start, 2 * width + values.stop),
        )

    def _input(self, name: str, hidden: int, ranks: Ranks) -> Iterator[Part]:
        """Yield a rank's rows of query, key, value, z, b and a, in this order, each of all its
        heads."""
        heads, values = self.value_heads, self.values
        if not self.interleaved:
            share = ranks.share(heads)
            yield Part(
                name.format("qkv"), (self.channels, hidden), self._mixed(ranks), least_bits=4
            )
            rows = rows_of(share, self.value_dim)
            yield Part(name.format("z"), (values, hidden), rows, least_bits=4)
            for kind in "ba":
                yield Part(name.format(kind), (heads, hidden), (share,))
            return
        shared, values_of = heads // self.key_heads, values // self.key_heads
        wide = self.key_dim, self.key_dim, values_of, values_of
        for kind, widths, bits in ("qkvz", wide, 4), ("ba", (shared,) * 2, 16):
            group, first = sum(widths), 0
            count = self.key_heads * group
            for width in widths:
                starts = [first + group * head for head in ranks.share(self.key_heads)]
                rows = tuple(range(start, start + width) for start in starts)
                yield Part(name.format(kind), (count, hidden), rows, least_bits=bits)
                first += width


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer's view of the state rows: tails `[rows, channels, taps - 1]` and recurrent matrices
    `[rows, value_heads, key_dim, value_dim]`; and of the updates, if they have pools."""

    conv: torch.Tensor
    recurrent: torch.Tensor
    updates: Updates | None = None


def state_pools(keys: tuple[int, int], values: tuple[int, int], taps: int) -> tuple[Pool, ...]:
    """Return the pools of a recurrent matrix per value head behind a convolution of that many
    taps. `keys` and `values`: heads and their dims. The channels are those of values, keys and
    queries, of each the last inputs, the oldest first. What updates hold: see `Updates`."""
    heads, dim = values
    mixed = (values, keys, keys)
    channels = sum(count * size for count, size in mixed)
    return (
        Pool("recurrent", "state", "row", (heads, keys[1], dim), split=0),
        Pool("conv", "inputs", "row", (channels, taps - 1), split=0, heads=mixed),
        Pool("update_keys", "exact", "update", keys, split=0),
        Pool("update_changes", "exact", "update", values, split=0),
        Pool("update_decays", "exact", "update", (heads,), split=0),
        Pool("update_inputs", "inputs", "update", (channels,), split=0, heads=mixed),
    )


def state_layer(pools: Mapping[str, torch.Tensor]) -> StateLayer:
    """Return a layer's view of its pools, see `state_pools`."""
    names = ("keys", "changes", "decays", "inputs")
    pool = {name: pools[f"update_{name}"] for name in names if f"update_{name}" in pools}
    return StateLayer(pools["conv"], pools["recurrent"], Updates(**pool) if pool else None)


@dataclass(frozen=True, slots=True)
class LoadedGatedDelta(LoadedMixer):
    """One product, `in_proj`, computes query, key, value, z, b and a, in this order."""

    sizes: GatedDelta
    in_proj: Linear
    conv: torch.Tensor
    neg_decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out_proj: OutputProjection
    eps: float

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
        wide = self.in_proj.of_norm(x, deterministic=step.deterministic, changes=step.changes)
        parts = [
            self._mix(wide[rows], cache, meta, step.deterministic) for meta, rows in step.parts()
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if keep is not None:
            out, residual = out[keep], residual[keep]
        return self.out_proj(out, residual, step.kept(keep))

    def _mix(
        self,
        wide: torch.Tensor,
        cache: StateLayer,
        meta: DecodeMeta | PrefillMeta | VerifyMeta,
        deterministic: bool,
    ) -> torch.Tensor:
        """Compute what lies between the products, for one kind of tokens."""
        sizes, weights = self.sizes, (self.conv, self.neg_decay, self.dt_bias, self.norm, self.eps)
        mixing = Mixing(*weights, cache.conv, cache.recurrent)
        if isinstance(meta, DecodeMeta):
            return mix_decode(wide, mixing, meta, deterministic=deterministic)
        qkv, z, raw = mixing.split(wide)
        beta, decay = gates(raw, self.neg_decay, self.dt_bias, deterministic=deterministic)
        if isinstance(meta, VerifyMeta):
            updates = cache.updates
            assert updates is not None, "no pools for updates"
            mixed = causal_conv_verify(qkv, self.conv, cache.conv, updates.inputs, meta)
            q, k, v = mixing.heads(mixed)
            core = verify_gated_delta(q, k, v, decay, beta, cache.recurrent, updates, meta)
        else:
            q, k, v = mixing.heads(causal_conv_prefill(qkv, self.conv, cache.conv, meta))
            core = chunk_gated_delta(q, k, v, decay, beta, cache.recurrent, meta)
        return gated_rms_norm(core, z, self.norm, self.eps).view(-1, sizes.values)

    def fold(self, cache: StateLayer, folds: Sequence[tuple[int, int, int]]) -> None:
        assert cache.updates is not None, "no pools for updates"
        fold_tails(cache.conv, cache.updates.inputs, folds)
        fold_gated_delta(cache.recurrent, cache.updates, folds)

    def lower(self, program: Program, cache: StateLayer, *, last: bool) -> None:
        sizes = self.sizes
        program.check_whole(
            linear_key_head_dim=sizes.key_dim, linear_value_head_dim=sizes.value_dim
        )
        shared = sizes.value_heads // sizes.key_heads
        if sizes.taps > MAX_TAPS:
            raise UnsupportedError(f"convolutions of {sizes.taps} taps")
        if shared > _MAX_SHARED:
            raise UnsupportedError(f"{shared} value heads for a key head")
        if cache.recurrent.dtype not in STATE_TYPES:
            raise UnsupportedError(f"states in {cache.recurrent.dtype}")
        wide = program.view("wide", self.in_proj.columns)
        mixed = program.view("mixed", sizes.values)
        program.product(self.in_proj, program.normed, wide)
        program.emit(
            "DeltaNet",
            x=wide,
            out=mixed,
            key_heads=sizes.key_heads,
            value_heads=sizes.value_heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            taps=sizes.taps,
            tail_stride=cache.conv.stride(0),
            state_stride=cache.recurrent.stride(0),
            state_type=STATE_TYPES[cache.recurrent.dtype],
            conv=program.vector(self.conv.T),
            neg_decay=program.vector(self.neg_decay),
            dt_bias=program.vector(self.dt_bias),
            norm=program.vector(self.norm),
            tails=cache.conv.data_ptr(),
            states=cache.recurrent.data_ptr(),
            eps=self.eps,
            **updates_record(cache),
        )
        if last:
            program.keep(mixed, sizes.values)
        self.out_proj.lower(program, mixed)


def updates_record(cache: StateLayer) -> dict[str, object]:
    """Return the record of compiled code's updates, if they have pools."""
    updates = cache.updates
    if updates is None or not updates.decays.shape[0]:
        return {}
    record = struct("Updates")(
        key_stride=updates.keys.stride(0),
        change_stride=updates.changes.stride(0),
        decay_stride=updates.decays.stride(0),
        input_stride=updates.inputs.stride(0),
        keys=updates.keys.data_ptr(),
        changes=updates.changes.data_ptr(),
        decays=updates.decays.data_ptr(),
        inputs=updates.inputs.data_ptr(),
    )
    return {"updates": record}
