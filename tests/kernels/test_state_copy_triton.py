"""Row copies on the Triton path."""

from __future__ import annotations

import pytest
import torch
from kernel_oracles import copy_rows_reference
from triton_case import DEVICE, kernels

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.state_copy import copy_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(9, 3), (9, 2, 5, 4), (9, 4100)])
def test_rows_arrive_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, device=DEVICE)
    pool = bits.view(dtype).squeeze(-1)
    src, dst = [7, 1, 2, 7], [0, 4, 5, 8]
    expected = copy_rows_reference(pool.view(torch.uint8), src, dst)
    with kernels():
        copy_rows([pool], src, dst)
    assert torch.equal(pool.view(torch.uint8), expected)


def test_pools_of_one_row_index_move_together_and_strides_are_kept() -> None:
    wide = torch.arange(6 * 10, dtype=torch.float32, device=DEVICE).view(6, 10)
    narrow = torch.arange(6 * 3, dtype=torch.bfloat16, device=DEVICE).view(6, 3)
    window = wide[:, 2:7]
    expected = copy_rows_reference(window, [0], [3]), copy_rows_reference(narrow, [0], [3])
    outside = wide[:, [0, 1, 7, 8, 9]].clone()
    with kernels():
        copy_rows([window, narrow], [0], [3])
    assert torch.equal(window, expected[0])
    assert torch.equal(narrow, expected[1])
    assert torch.equal(wide[:, [0, 1, 7, 8, 9]], outside)


def test_a_row_with_holes_is_refused() -> None:
    with kernels(), pytest.raises(KernelArgumentError, match="tensors"):
        copy_rows([torch.zeros(4, 3, 2).transpose(1, 2)], [0], [1])
