"""Interleaved multimodal rotary embedding (M-RoPE), partial, with the query/key norm before it.

As in Qwen3.5 (transformers' Qwen3_5TextRotaryEmbedding and apply_rotary_pos_emb): the first `rot`
dims of a head are rotated in halves (`rotate_half`); the rest pass through. Of the `rot / 2`
frequencies, those at 1, 4, 7, ... use the height position and those at 2, 5, 8, ... the width
position, as many as `sections` says. All others use the temporal one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlm_serve.kernels.checks import FLOAT_DTYPES, KernelArgumentError, check_tensor
from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.rope import compiled, reference
from vlm_serve.kernels.rope.reference import Rotation

__all__ = ["Rotation", "check_heads", "mrope_cos_sin", "qk_norm_rope"]

_cos_sin = Op(reference.mrope_cos_sin, compiled=compiled.mrope_cos_sin)
_norm_rope = Op(
    reference.qk_norm_rope,
    compiled=compiled.qk_norm_rope,
    triton="vlm_serve.kernels.rope.triton:qk_norm_rope",
)


def mrope_cos_sin(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    sections: Sequence[int],
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosine and sine of every token's angles, once per step for all layers.

    Args:
        positions: int64 `[3, T]`: temporal, height and width position.
        inv_freq: float32 `[rot / 2]`.
        sections: number of frequencies of (temporal, height, width); interleaved.
        scale: factor of cosines and sines.

    Returns:
        (cos, sin), float32 `[T, rot / 2]` each.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    check_tensor("positions", positions, (3, None), (torch.int64,), inv_freq.device)
    check_tensor("inv_freq", inv_freq, (None,), (torch.float32,), inv_freq.device)
    if len(sections) != 3:
        raise KernelArgumentError("sections", "expected three sizes")
    return _cos_sin(inv_freq.device, positions, inv_freq, sections, scale)


def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a zero-centred RMS norm to each head, then the partial rotation; float32 inside.

    Args:
        q: `[T, Hq, D]`, float32, bfloat16 or float16, any strides with a dense last dimension.
        k: `[T, Hkv, D]`, as q.
        rotation: norms and angles.

    Returns:
        (q, k), new contiguous tensors of the same shapes and dtypes.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    check_heads(q, k, rotation)
    return _norm_rope(q.device, q, k, rotation)


def check_heads(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> None:
    """Check the arguments of `qk_norm_rope`.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    (tokens, _, dim), device = q.shape, q.device
    q_weight, k_weight, cos, sin, _ = rotation
    check_tensor("q", q, (tokens, None, dim), FLOAT_DTYPES, device)
    check_tensor("k", k, (tokens, None, dim), (q.dtype,), device)
    check_tensor("q_weight", q_weight, (dim,), FLOAT_DTYPES, device)
    check_tensor("k_weight", k_weight, (dim,), FLOAT_DTYPES, device)
    check_tensor("cos", cos, (tokens, None), (torch.float32,), device)
    check_tensor("sin", sin, cos.shape, (torch.float32,), device)
    if 2 * cos.shape[1] > dim:
        raise KernelArgumentError("cos", f"rotates {2 * cos.shape[1]} of {dim} dims")
