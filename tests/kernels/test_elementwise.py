"""An element's bits depend on nothing but the element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from vlm_serve.kernels.elementwise import silu, softplus, times_sigmoid

pytestmark = pytest.mark.usefixtures("cpu_path")

Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("function", [silu, softplus, lambda x: times_sigmoid(x, x * 2)])
def test_bits_do_not_depend_on_the_batch(function: Function, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for columns in (8, 100):
            x = torch.randn(2000, columns) * 4
            whole = function(x)
            for rows in (1, 17, 100, 777, 1999):
                for start in (0, 5, 2000 - rows):
                    part = x[start : start + rows]
                    assert torch.equal(function(part), whole[start : start + rows])
    finally:
        torch.set_num_threads(before)


def test_values() -> None:
    x = torch.cat([torch.randn(1000) * 10, torch.tensor([0.0, -1e4, 1e4, -90.0, 90.0])])
    wide = x.double()
    torch.testing.assert_close(silu(x).double(), F.silu(wide), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(softplus(x).double(), F.softplus(wide), atol=1e-6, rtol=1e-6)
    column = torch.randn(1005, 1)
    got = times_sigmoid(x[:, None].expand(-1, 3), column)
    expected = wide[:, None] * torch.sigmoid(column.double())
    torch.testing.assert_close(got.double(), expected.expand(-1, 3), atol=1e-6, rtol=1e-6)


def test_arguments_are_left_alone() -> None:
    x, gate = torch.randn(5), torch.randn(5)
    kept = x.clone(), gate.clone()
    for result in (times_sigmoid(x, gate), silu(x), softplus(x)):
        assert result.shape == x.shape
    assert torch.equal(x, kept[0]) and torch.equal(gate, kept[1])


def test_narrow_types_are_rounded_once() -> None:
    x, gate = torch.randn(2, 1000).bfloat16()
    exact = x.double() * torch.sigmoid(gate.double())
    got = times_sigmoid(x, gate)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, atol=0, rtol=2**-8)
