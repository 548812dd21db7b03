"""Mixture of experts: top-k router and routed expert MLPs.

As in Qwen3.5-MoE (transformers' Qwen3_5MoeTopKRouter and Qwen3_5MoeExperts), and with sigmoids as
in LFM2-MoE (Lfm2MoeTopKRouter). The shared expert is
an ordinary MLP and belongs to the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels.checks import FLOAT_DTYPES, KernelArgumentError, check_tensor
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.linear.base import ChangedRows
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.moe import reference
from vlm_serve.kernels.moe.reference import Addends, Sigmoids

_TRITON = "vlm_serve.kernels.moe.triton"
_route = Op(reference.route, triton=f"{_TRITON}:route")
_experts = Op(reference.routed_experts, triton=f"{_TRITON}:routed_experts")


def route(
    logits: torch.Tensor, top_k: int, sigmoids: Sigmoids | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the top_k experts of each token and their weights, which sum to 1.

    Softmax in float32 over all experts, then top-k, then renormalisation; or sigmoids instead of
    the softmax.

    Args:
        logits: `[T, E]`, float32, bfloat16 or float16.
        top_k: experts per token, 1..E.
        sigmoids: how experts are chosen by sigmoids; None: by the softmax.

    Returns:
        (weights `[T, top_k]` in the dtype of logits, in the descending order of the choice; ids
        int64 `[T, top_k]`).

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    check_tensor("logits", logits, (None, None), FLOAT_DTYPES, logits.device)
    if not 1 <= top_k <= logits.shape[1]:
        raise KernelArgumentError("top_k", f"{top_k}, expected 1..{logits.shape[1]}")
    if sigmoids is not None and sigmoids.bias is not None:
        bias = sigmoids.bias
        check_tensor("bias", bias, (logits.shape[1],), (torch.float32,), logits.device)
    return _route(logits.device, logits, top_k, sigmoids)


def routed_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor | Stored | Sequence[Linear],
    down: torch.Tensor | Stored | Sequence[Linear],
    *,
    deterministic: bool = False,
    changes: ChangedRows | None = None,
    sites: tuple[int, int] = (0, 0),
    addends: Addends | None = None,
) -> torch.Tensor:
    """Compute `sum_j weights[t, j] * down[e] @ (silu(gate) * up)` for every token t.

    Here `e = ids[t, j]` and `gate, up = gate_up[e] @ x[t]`. The sum is taken in float32, over
    ascending expert ids. Without gates, `gate_up` holds up alone, and `max(up, 0)` squared takes
    the place of `silu(gate) * up`, as in Nemotron-H (transformers' NemotronHExperts).

    Args:
        x: `[T, H]`, float32, bfloat16 or float16.
        weights: `[T, k]`, the dtype of x.
        ids: int64 `[T, k]`, distinct within a token, 0..E-1.
        gate_up: `[E, 2I, H]`, gate rows first, the dtype of x; or quantised, `[E * 2I, H]`; or on a
            CPU the projections gate and up of expert 0, of expert 1, ...
        down: `[E, H, I]`, the dtype of x; or quantised, `[E * H, I]`; or on a CPU one projection
            per expert.
        deterministic: make a token's bits independent of the other tokens; on a CPU only with
            projections.
        changes: the adapters of the rows, if any have one.
        sites: the numbers of gate_up and down if they lie in one piece; 0: no adapter reaches them.
        addends: what is added to the sum, after it is rounded; None: nothing.

    Returns:
        `[T, H]` in the dtype of x.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    device = x.device
    check_tensor("x", x, (None, None), FLOAT_DTYPES, device)
    check_tensor("weights", weights, (x.shape[0], None), (x.dtype,), device)
    check_tensor("ids", ids, weights.shape, (torch.int64,), device)
    _check_experts(x, gate_up, down)
    if addends is not None:
        _check_addends(x, addends)
    if changes is not None and not isinstance(gate_up, torch.Tensor | Stored):
        return reference.routed_experts(
            x,
            weights,
            ids,
            gate_up,
            down,
            deterministic=deterministic,
            addends=addends,
            changes=changes,
        )
    stacked = None if changes is None else changes.experts(sites, device)
    return _experts(
        device,
        x,
        weights,
        ids,
        gate_up,
        down,
        deterministic=deterministic,
        addends=addends,
        sites=stacked,
    )


def _check_addends(x: torch.Tensor, addends: Addends) -> None:
    check_tensor("addends.residual", addends.residual, x.shape, (x.dtype,), x.device)
    if (addends.shared is None) != (addends.gate is None):
        raise KernelArgumentError("addends.gate", "given if and only if shared is")
    if addends.shared is not None and addends.gate is not None:
        check_tensor("addends.shared", addends.shared, x.shape, (x.dtype,), x.device)
        check_tensor("addends.gate", addends.gate, (x.shape[0], 1), (x.dtype,), x.device)


def _check_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor | Stored | Sequence[Linear],
    down: torch.Tensor | Stored | Sequence[Linear],
) -> None:
    if isinstance(gate_up, Stored):
        if not isinstance(down, Stored):
            raise KernelArgumentError("down", "quantised in one piece if and only if gate_up is")
        hidden, experts = x.shape[1], down.codes.shape[0] / x.shape[1]
        rows = gate_up.codes.shape[0] / (experts * down.depth)
        if gate_up.depth != hidden or rows not in (1, 2):
            raise KernelArgumentError("gate_up", f"does not fit {hidden} channels and down")
        return
    if isinstance(down, Stored):
        raise KernelArgumentError("down", "quantised in one piece if and only if gate_up is")
    if isinstance(gate_up, torch.Tensor):
        if not isinstance(down, torch.Tensor):
            raise KernelArgumentError("down", "one tensor if and only if gate_up is")
        check_tensor("gate_up", gate_up, (None, None, x.shape[1]), (x.dtype,), x.device)
        experts, rows = gate_up.shape[:2]
        check_tensor("down", down, (experts, x.shape[1], None), (x.dtype,), x.device)
        if rows not in (down.shape[2], 2 * down.shape[2]):
            raise KernelArgumentError("gate_up", f"{rows} rows do not fit {down.shape[2]} of down")
        return
    if isinstance(down, torch.Tensor):
        raise KernelArgumentError("down", "one tensor if and only if gate_up is")
    if len(gate_up) not in (len(down), 2 * len(down)):
        raise KernelArgumentError("gate_up", f"{len(gate_up)} parts for {len(down)} experts")
    size = gate_up[0].columns
    for name, parts, shape in (
        ("gate_up", gate_up, (size, x.shape[1])),
        ("down", down, (x.shape[1], size)),
    ):
        if (parts[0].columns, parts[0].depth) != shape:
            raise KernelArgumentError(name, f"expected {list(shape)}")
