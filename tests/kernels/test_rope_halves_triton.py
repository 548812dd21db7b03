"""Rotation of whole heads: the bits of operations of their own, in one launch."""

from __future__ import annotations

import pytest
import torch
from triton_case import DEVICE, kernels, randn

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.rope.halves import _rotate, rotate_halves
from vlm_serve.kernels.triton_support import Target, record_launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(5, 3, 24), (2, 16, 72), (0, 2, 8)])
def test_a_rotation_has_the_bits_of_operations_of_their_own(
    dtype: torch.dtype, tokens: int, heads: int, dim: int
) -> None:
    x = randn(tokens, 3, heads, dim, dtype=dtype)[:, :2]
    turns = randn(2, tokens + 3, dim // 2, seed=1)[:, :tokens]
    wanted = _rotate.torch(x, turns)
    with kernels():
        found = rotate_halves(x, turns)
        wide = torch.cat([x, x], dim=-1)[..., :dim]  # heads with something between them
        split = rotate_halves(wide, turns.clone())
    assert found.is_contiguous() and found.dtype == dtype
    assert torch.equal(found, wanted) and torch.equal(split, wanted)


def test_it_is_one_launch_whose_products_are_rounded() -> None:
    x, turns = randn(4, 2, 2, 8), randn(2, 4, 4)
    with kernels(), record_launches(Target("cuda", 90)) as launches:
        rotate_halves(x, turns)
    (only,) = launches
    assert only.options["enable_fp_fusion"] is False


def test_angles_belong_to_tokens() -> None:
    with kernels(), pytest.raises(KernelArgumentError, match="turns"):
        rotate_halves(randn(4, 2, 2, 8).to(DEVICE), randn(2, 5, 4))
