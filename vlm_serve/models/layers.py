"""The blocks of the language model: token mixers and feed-forward parts, over packed tokens.

Each is a frozen bundle of weights and one flat function. Numerics follow transformers'
Qwen3_5GatedDeltaNet, Qwen3_5Attention, Qwen3_5MLP and Qwen3_5MoeSparseMoeBlock; where they round an
intermediate result to bfloat16 that here stays in a register, ours is the more exact one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlm_serve.kernels.causal_conv import causal_conv_decode, causal_conv_prefill
from vlm_serve.kernels.elementwise import times_sigmoid
from vlm_serve.kernels.gated_delta import chunk_gated_delta, gates, recurrent_gated_delta
from vlm_serve.kernels.kv_write import write_kv
from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.moe import route, routed_experts
from vlm_serve.kernels.norms import gated_rms_norm
from vlm_serve.kernels.paged_attention import attention_decode, attention_prefill
from vlm_serve.kernels.rope import qk_norm_rope


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward shares. The first `num_decode` of the packed tokens are the
    decode tokens."""

    decode: DecodeMeta | None
    prefill: PrefillMeta | None
    num_decode: int
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    deterministic: bool


@dataclass(frozen=True, slots=True)
class StateLayer:
    """One GDN layer's view of the state rows: tails `[rows, conv_dim, kernel - 1]` and recurrent
    matrices `[rows, value_heads, key_dim, value_dim]`."""

    conv: torch.Tensor
    recurrent: torch.Tensor


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """`in_proj` gives query, key, value, z, b and a, in this order, from one product."""

    in_proj: Linear
    conv: torch.Tensor
    neg_decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out_proj: Linear
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class Attention:
    """`in_proj` gives query, key, value and output gate, in this order, from one product."""

    in_proj: Linear
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    out_proj: Linear
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class Mlp:
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """`router` has one row per expert and a last one for the gate of the shared expert; `gate_up`
    and `down` are as `routed_experts` takes them."""

    router: Linear
    gate_up: torch.Tensor | tuple[Linear, ...]
    down: torch.Tensor | tuple[Linear, ...]
    shared: Mlp
    top_k: int


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: norm, token mixer, norm, feed-forward."""

    input_norm: torch.Tensor
    mixer: GatedDeltaNet | Attention
    post_norm: torch.Tensor
    feed_forward: Mlp | Experts


def gated_delta_net(
    layer: GatedDeltaNet,
    x: torch.Tensor,
    residual: torch.Tensor,
    state: StateLayer,
    step: Step,
    keep: torch.Tensor | None,
) -> torch.Tensor:
    """Mix tokens through the recurrent state, which is updated in place.

    Args:
        layer: weights.
        x: `[T, hidden]` normed input.
        residual: `[T, hidden]`, added to the output.
        state: this layer's state rows.
        step: this forward.
        keep: rows whose output is wanted, None for all.

    Returns:
        `[T or len(keep), hidden]`.
    """
    tokens, deterministic = x.shape[0], step.deterministic
    values, first = layer.value_heads * layer.value_dim, step.num_decode
    channels = 2 * layer.key_heads * layer.key_dim + values
    mixed = layer.in_proj(x, deterministic=deterministic)
    qkv, z, raw = torch.split_with_sizes(mixed, (channels, values, 2 * layer.value_heads), 1)
    beta, decay = gates(raw, layer.neg_decay, layer.dt_bias, deterministic=deterministic)
    if step.prefill is None:
        core = _decode_delta(layer, qkv, decay, beta, state, step.decode)
    elif step.decode is None:
        core = _prefill_delta(layer, qkv, decay, beta, state, step.prefill)
    else:
        core = torch.cat(
            [
                _decode_delta(layer, qkv[:first], decay[:first], beta[:first], state, step.decode),
                _prefill_delta(
                    layer, qkv[first:], decay[first:], beta[first:], state, step.prefill
                ),
            ]
        )
    z = z.view(tokens, layer.value_heads, layer.value_dim)
    if keep is not None:
        core, z, residual = core[keep], z[keep], residual[keep]
    out = gated_rms_norm(core, z, layer.norm, layer.eps).flatten(1)
    return layer.out_proj(out, plus=residual, deterministic=deterministic)


def _split_heads(
    layer: GatedDeltaNet, qkv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, width = qkv.shape[0], layer.key_heads * layer.key_dim
    q, k, v = torch.split_with_sizes(qkv, (width, width, qkv.shape[1] - 2 * width), 1)
    return (
        q.view(tokens, layer.key_heads, layer.key_dim),
        k.view(tokens, layer.key_heads, layer.key_dim),
        v.view(tokens, layer.value_heads, layer.value_dim),
    )


def _prefill_delta(
    layer: GatedDeltaNet,
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: StateLayer,
    meta: PrefillMeta,
) -> torch.Tensor:
    q, k, v = _split_heads(layer, causal_conv_prefill(qkv, layer.conv, state.conv, meta))
    return chunk_gated_delta(q, k, v, decay, beta, state.recurrent, meta)


def _decode_delta(
    layer: GatedDeltaNet,
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: StateLayer,
    meta: DecodeMeta | None,
) -> torch.Tensor:
    assert meta is not None, "a step has decode or prefill tokens"
    q, k, v = _split_heads(layer, causal_conv_decode(qkv, layer.conv, state.conv, meta))
    return recurrent_gated_delta(q, k, v, decay, beta, state.recurrent, meta)


def attention(
    layer: Attention,
    x: torch.Tensor,
    residual: torch.Tensor,
    kv: KVLayer,
    step: Step,
    keep: torch.Tensor | None,
) -> torch.Tensor:
    """Mix tokens through attention over the paged keys and values, which are written first.

    Arguments and result as for `gated_delta_net`, with `kv` for the state.
    """
    tokens, dim = x.shape[0], layer.head_dim
    queries, keys = layer.heads * dim, layer.kv_heads * dim
    mixed = layer.in_proj(x, deterministic=step.deterministic)
    q, k, v, gate = torch.split_with_sizes(mixed, (queries, keys, keys, queries), 1)
    q, k = qk_norm_rope(
        q.view(tokens, layer.heads, dim),
        k.view(tokens, layer.kv_heads, dim),
        layer.q_norm,
        layer.k_norm,
        step.cos,
        step.sin,
        layer.eps,
    )
    v = v.view(tokens, layer.kv_heads, dim)
    write_kv(k, v, kv, step.slots)
    out = _attend(q, kv, step, dim**-0.5).flatten(1)
    if keep is not None:
        out, gate, residual = out[keep], gate[keep], residual[keep]
    out = times_sigmoid(out, gate)
    return layer.out_proj(out, plus=residual, deterministic=step.deterministic)


def _attend(q: torch.Tensor, kv: KVLayer, step: Step, scale: float) -> torch.Tensor:
    first, deterministic = step.num_decode, step.deterministic
    if step.prefill is None:
        assert step.decode is not None, "a step has decode or prefill tokens"
        return attention_decode(q, kv, step.decode, scale=scale)
    if step.decode is None:
        return attention_prefill(q, kv, step.prefill, scale=scale, deterministic=deterministic)
    prefilled = attention_prefill(
        q[first:], kv, step.prefill, scale=scale, deterministic=deterministic
    )
    return torch.cat([attention_decode(q[:first], kv, step.decode, scale=scale), prefilled])


def mlp(layer: Mlp, x: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor:
    """`residual + down(silu(gate(x)) * up(x))`, `[T, hidden]`."""
    hidden = layer.gate.gated(layer.up, x, deterministic=step.deterministic)
    return layer.down(hidden, plus=residual, deterministic=step.deterministic)


def experts(
    layer: Experts, x: torch.Tensor, residual: torch.Tensor, step: Step
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed experts plus the gated shared expert.

    Returns:
        (`[T, hidden]` with the residual added, int64 `[T, top_k]` routed expert ids).
    """
    deterministic = step.deterministic
    scores = layer.router(x, deterministic=deterministic)
    weights, ids = route(scores[:, :-1], layer.top_k)
    routed = routed_experts(x, weights, ids, layer.gate_up, layer.down, deterministic=deterministic)
    hidden = layer.shared.gate.gated(layer.shared.up, x, deterministic=deterministic)
    shared = layer.shared.down(hidden, deterministic=deterministic)
    gate = scores[:, -1:]
    return residual + (routed + times_sigmoid(shared, gate)), ids
