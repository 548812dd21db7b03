"""Multimodal rotary embedding (M-RoPE), partial, with the query/key norm before it, if any.

The first `rot` dims of a head are rotated in halves (`rotate_half`); the rest pass through. Of the
`rot / 2` frequencies, as many as `sections` says use the height and the width position, all others
the temporal one. In Qwen3.5 (transformers' Qwen3_5TextRotaryEmbedding) they are interleaved: those
at 1, 4, 7, ... use the height and those at 2, 5, 8, ... the width. In Qwen2-VL
(Qwen2VLRotaryEmbedding) each axis has a run of its own.
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
    interleaved: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosine and sine of every token's angles, once per step for all layers.

    Args:
        positions: int64, or float64 with fractions, `[3, T]`: temporal, height and width position.
        inv_freq: float32 `[rot / 2]`.
        sections: number of frequencies of (temporal, height, width).
        scale: factor of cosines and sines.
        interleaved: whether the axes' frequencies alternate, or follow each other.

    Returns:
        (cos, sin), float32 `[T, rot / 2]` each.

    Raises:
        KernelArgumentError: naming the argument at fault.
    """
    check_tensor("positions", positions, (3, None), (torch.int64, torch.float64), inv_freq.device)
    check_tensor("inv_freq", inv_freq, (None,), (torch.float32,), inv_freq.device)
    if len(sections) != 3:
        raise KernelArgumentError("sections", "expected three sizes")
    return _cos_sin(inv_freq.device, positions, inv_freq, sections, scale, interleaved)


def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a zero-centred RMS norm to each head, if there is one, then the partial rotation;
    float32 inside.

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
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_tensor(name, weight, (dim,), FLOAT_DTYPES, device)
    check_tensor("cos", cos, (tokens, None), (torch.float32,), device)
    check_tensor("sin", sin, cos.shape, (torch.float32,), device)
    if 2 * cos.shape[1] > dim:
        raise KernelArgumentError("cos", f"rotates {2 * cos.shape[1]} of {dim} dims")
