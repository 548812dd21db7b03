"""The full-attention mixer over paged keys and values, with or without an output gate.

Numerics follow transformers' Qwen3_5Attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vlm_serve.kernels.elementwise import times_sigmoid
from vlm_serve.kernels.kv_quant.compiled import pages_record
from vlm_serve.kernels.kv_write import rotate_and_write
from vlm_serve.kernels.linear import Linear, Part
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta, VerifyMeta
from vlm_serve.kernels.norms import Normed
from vlm_serve.kernels.paged_attention import (
    MOST_TILE_ROWS,
    attention_decode,
    attention_prefill,
    attention_verify,
    sums_bytes,
    without_first,
)
from vlm_serve.kernels.ranks import Ranks
from vlm_serve.kernels.rope import Rotation
from vlm_serve.kernels.rope.compiled import MAX_DIM
from vlm_serve.models.cache_layout import BLOCK_SIZE, Pool
from vlm_serve.models.parts.base import (
    LoadedMixer,
    Mixer,
    Norm,
    OutputProjection,
    Step,
    load_norm,
    rows_of,
)
from vlm_serve.models.program import Program, UnsupportedError
from vlm_serve.models.weights import Weights

QK_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class Attention(Mixer):
    """Sizes. `gated`: the output is multiplied by the sigmoid of a gate, whose rows follow the
    query's of each head in the checkpoint. `bias`: of queries, keys and values; `out_bias`: of the
    output. `name` is the prefix of its tensors' names; `norms` are those of queries and of keys
    within it, if their heads have norms, `out` of the output projection. `scale` is the factor of
    scores; None: `head_dim ** -0.5`."""

    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = True
    bias: bool = False
    out_bias: bool = False
    name: str = "self_attn"
    norms: tuple[str, str] | None = QK_NORMS
    out: str = "o_proj"
    scale: float | None = None

    @property
    def factor(self) -> float:
        """The factor of scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def queries(self) -> int:
        """Channels of all queries, and of the output."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    def pools(self) -> tuple[Pool, ...]:
        # Scales are those of int8: k scale, k zero, v scale, v zero of each token and head.
        # Few queries are memory-bound, and reading is faster if a head's tokens are contiguous.
        pages = (2, BLOCK_SIZE, self.kv_heads, self.head_dim)
        return (
            Pool("kv", "kv", "block", pages, split=2, swapped=1),
            Pool("kv_scales", "scales", "block", (4, BLOCK_SIZE, self.kv_heads), split=2),
        )

    def sums_bytes(self, tokens: int, slices: int, keys: int) -> int:
        rows = tokens * self.heads + slices * MOST_TILE_ROWS * self.kv_heads
        return sums_bytes(rows, self.head_dim, keys)

    def heads_to_split(self) -> Mapping[str, int]:
        return {"attention heads": self.heads}

    def heads_to_repeat(self) -> Mapping[str, int]:
        return {"key-value heads": self.kv_heads}

    def load(self, source: Weights, layer: str, hidden: int, norm: Norm) -> LoadedAttention:
        name, dim, ranks = f"{layer}.{self.name}", self.head_dim, source.ranks
        rank_sizes = replace(
            self,
            heads=len(ranks.share(self.heads)),
            kv_heads=len(ranks.share_or_copy(self.kv_heads)),
        )
        return LoadedAttention(
            sizes=rank_sizes,
            in_proj=source.linear(
                *self._input(f"{name}.{{}}_proj.weight", (hidden,), ranks),
                bias=self._input(f"{name}.{{}}_proj.bias", (), ranks) if self.bias else None,
            ),
            q_norm=load_norm(source, f"{name}.{self.norms[0]}", dim, norm) if self.norms else None,
            k_norm=load_norm(source, f"{name}.{self.norms[1]}", dim, norm) if self.norms else None,
            out_proj=OutputProjection.load(
                source,
                Part(f"{name}.{self.out}.weight", (hidden, self.queries), least_bits=4),
                Part(f"{name}.{self.out}.bias", (hidden,)) if self.out_bias else None,
            ),
            eps=norm.eps,
        )

    def _input(self, name: str, tail: tuple[int, ...], ranks: Ranks) -> list[Part]:
        """Return query, key, value and gate rows of a rank: all queries first, all gates last."""
        dim, heads = self.head_dim, ranks.share(self.heads)
        rows = rows_of(ranks.share_or_copy(self.kv_heads), dim)
        keys = [Part(name.format(kind), (self.keys, *tail), rows, least_bits=4) for kind in "kv"]
        if not self.gated:
            head_rows = rows_of(heads, dim)
            return [Part(name.format("q"), (self.queries, *tail), head_rows, least_bits=4), *keys]
        both, starts = (2 * self.queries, *tail), [2 * dim * head for head in heads]
        queries = tuple(range(start, start + dim) for start in starts)
        gates = tuple(range(start + dim, start + 2 * dim) for start in starts)
        first, last = (
            Part(name.format("q"), both, rows, least_bits=4) for rows in (queries, gates)
        )
        return [first, *keys, last]


@dataclass(frozen=True, slots=True)
class LoadedAttention(LoadedMixer):
    """One product, `in_proj`, computes query, key, value and, if there is one, gate."""

    sizes: Attention
    in_proj: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out_proj: OutputProjection
    eps: float

    def bind(self, pools: Mapping[str, torch.Tensor]) -> KVLayer:
        scales = pools.get("kv_scales")
        parts = () if scales is None else scales.unbind(1)
        return KVLayer(*pools["kv"].unbind(1), *parts)

    def apply(
        self,
        x: Normed,
        residual: torch.Tensor,
        cache: KVLayer,
        step: Step,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        sizes = self.sizes
        wide = self.in_proj.of_norm(x, deterministic=step.deterministic, changes=step.changes)
        widths = [sizes.queries, sizes.keys, sizes.keys]
        q, k, v, *gate = torch.split_with_sizes(wide, widths + [sizes.queries] * sizes.gated, 1)
        q = rotate_and_write(
            q.view(-1, sizes.heads, sizes.head_dim),
            k.view(-1, sizes.kv_heads, sizes.head_dim),
            v.view(-1, sizes.kv_heads, sizes.head_dim),
            Rotation(self.q_norm, self.k_norm, step.cos, step.sin, self.eps),
            cache,
            step.slots,
        )
        parts = [
            self._attend(q[rows], cache, meta, [gate_part[rows] for gate_part in gate], step)
            for meta, rows in step.parts()
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if keep is not None:
            out, residual = out[keep], residual[keep]
        return self.out_proj(out, residual, step.kept(keep))

    def _attend(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        meta: DecodeMeta | PrefillMeta | VerifyMeta,
        gate: Sequence[torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        """Attend from one kind of tokens; `gate`: theirs, if there is one. Return
        `[T, heads * D]`."""
        scale = self.sizes.factor
        if isinstance(meta, VerifyMeta):
            return attention_verify(q, cache, meta, *gate, scale=scale).flatten(1)
        if isinstance(meta, DecodeMeta):
            own = attention_decode(q, cache, meta, *gate, scale=scale, first_key=step.first_key)
            return own.flatten(1)
        if step.first_key:
            cache, meta = without_first(cache, meta, step.first_key, q.dtype)
        out = attention_prefill(q, cache, meta, scale=scale).flatten(1)
        return times_sigmoid(out, gate[0]) if gate else out

    def lower(self, program: Program, cache: KVLayer, *, last: bool) -> None:
        sizes, k = self.sizes, cache.k
        program.check_whole(head_dim=sizes.head_dim)
        if sizes.head_dim > MAX_DIM:
            raise UnsupportedError(f"head_dim is {sizes.head_dim}, more than {MAX_DIM}")
        pages = pages_record(cache, program.dtype)
        if pages is None:
            raise UnsupportedError(f"KV pages in {k.dtype} beside activations in {program.dtype}")
        shape = {"heads": sizes.heads, "kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
        wide = program.view("wide", self.in_proj.columns)
        mixed = program.view("mixed", sizes.queries)
        program.product(self.in_proj, program.normed, wide)
        program.emit(
            "Heads",
            x=wide,
            cos=program.cos,
            sin=program.sin,
            half=program.cos.stride,
            q_norm=program.factors(self.q_norm),
            k_norm=program.factors(self.k_norm),
            eps=self.eps,
            pages=pages,
            **shape,
        )
        program.emit(
            "Attend",
            q=wide,
            out=mixed,
            pages=pages,
            first_key=program.first_key,
            scale=sizes.factor,
            **shape,
        )
        if sizes.gated:
            gate = wide.at(sizes.queries + 2 * sizes.keys)
            program.emit("Sigmoid", x=mixed, gate=gate, width=sizes.queries)
        if last:
            program.keep(mixed, sizes.queries)
        self.out_proj.lower(program, mixed)
