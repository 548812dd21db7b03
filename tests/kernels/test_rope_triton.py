"""Query/key norm and rotation on the Triton path against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from kernel_oracles import qk_norm_rope_reference
from triton_case import DEVICE, TOLERANCE, assert_near, kernels, randn

from vlm_serve.kernels.rope import Rotation, mrope_cos_sin, qk_norm_rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("q_heads", "k_heads", "dim", "rotated"),
    [(4, 1, 64, 16), (6, 2, 48, 24), (5, 5, 32, 32), (16, 1, 256, 64)],
)
def test_both_tensors(
    dtype: torch.dtype, q_heads: int, k_heads: int, dim: int, rotated: int
) -> None:
    fused = randn(5, q_heads, 2 * dim, dtype=dtype)
    q, k = fused[..., :dim], randn(5, k_heads, dim, dtype=dtype, seed=1)
    weights = randn(dim, seed=2), randn(dim, seed=3)
    positions = torch.randint(0, 5000, (3, 5), device=DEVICE)
    frequencies = 1.0 / 10000 ** (torch.arange(rotated // 2, device=DEVICE) / (rotated // 2))
    share = rotated // 6
    cos, sin = mrope_cos_sin(positions, frequencies, (rotated // 2 - 2 * share, share, share))
    with kernels():
        results = qk_norm_rope(q, k, Rotation(*weights, cos, sin, 1e-6))
        plain = qk_norm_rope(q, k, Rotation(None, None, cos, sin, 1e-6))
    cases = zip((*results, *plain), 2 * (q, k), (*weights, None, None), strict=True)
    for result, x, weight in cases:
        assert result.dtype == dtype and result.is_contiguous()
        expected = qk_norm_rope_reference(x, weight, cos, sin, 1e-6)
        assert_near(result, expected, TOLERANCE[dtype])
