"""What ops should compute, in float64: their plain implementations over exact inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels.causal_conv.reference import SILU, Behind, convolve
from vlm_serve.kernels.gated_delta.reference import Tokens, steps_of
from vlm_serve.kernels.kv_quant import pick
from vlm_serve.kernels.metadata import KVLayer
from vlm_serve.kernels.moe.reference import routed_experts
from vlm_serve.kernels.norms import reference as norms
from vlm_serve.kernels.paged_attention.reference import attend
from vlm_serve.kernels.rope.reference import norm_rope


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return norms.rms_norm(x.double(), weight, eps)


def gated_rms_norm_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate_first: bool = False,
) -> torch.Tensor:
    return norms.gated_rms_norm(x.double(), gate.double(), weight, eps, gate_first=gate_first)


def qk_norm_rope_reference(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """Of one of q and k, `[T, H, D]`."""
    return norm_rope(x.double(), weight, cos[:, None], sin[:, None], eps)


def causal_conv_reference(
    x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor | None, behind: Behind = SILU
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence's outputs, and the tails after 0, 1, ... n tokens in x's dtype."""
    tail = None if tail is None else tail.double()
    bias = None if behind.bias is None else behind.bias.double()
    out, seen = convolve(x.double(), weight.double(), tail, behind._replace(bias=bias))
    tails = [seen[place:][: weight.shape[1] - 1].T for place in range(len(x) + 1)]
    return out, torch.stack(tails).to(x.dtype)


def gated_delta_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    skip: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence's outputs and the states after 1 ... n tokens."""
    shape = v.shape[1], k.shape[2], v.shape[2]
    first = v.new_zeros(shape) if state is None else state
    q, k, v, g, beta = (each.double() for each in (q, k, v, g, beta))
    tokens = Tokens(q, k, v, g, beta, None if skip is None else skip.double())
    outs, states = [], []
    for out, _, after in steps_of(tokens, first.double()):
        outs.append(out[:, 0])
        states.append(after)
    if not outs:
        return tokens.v, first.new_empty(0, *shape).double()
    return torch.stack(outs), torch.stack(states)


def attention_reference(
    q: torch.Tensor, kv: KVLayer, table: Sequence[int], start: int, scale: float
) -> torch.Tensor:
    """Of one sequence, whose queries are at positions start, start + 1, ..."""
    keys, values = (
        pick(*stored, torch.tensor(table), torch.float64).flatten(0, 1)[: start + len(q)]
        for stored in ((kv.k, kv.k_scale, kv.k_zero), (kv.v, kv.v_scale, kv.v_zero))
    )
    return attend(q.double(), keys, values, scale)


def routed_experts_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    x, weights, gate_up, down = (each.double() for each in (x, weights, gate_up, down))
    return routed_experts(x, weights, ids, gate_up, down, deterministic=True)


def copy_rows_reference(
    tensor: torch.Tensor, src_rows: Sequence[int], dst_rows: Sequence[int]
) -> torch.Tensor:
    result = tensor.clone()
    for src, dst in zip(src_rows, dst_rows, strict=True):
        result[dst] = tensor[src]
    return result
