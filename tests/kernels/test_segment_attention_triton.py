"""Attention of packed segments on the Triton path: against float64, and untouched by what is beside
a segment."""

from __future__ import annotations

import pytest
import torch
from triton_case import DEVICE, TOLERANCE, assert_near, kernels, randn, row_by_row

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.segment_attention import ROWS, segment_attention, segment_tiles

LENGTHS = (5, 130, 64, 1)


def tiles_of(lengths: tuple[int, ...], extra: int = 0) -> torch.Tensor:
    tiles = [*segment_tiles(lengths), *[(0, 0, 0)] * extra]
    return torch.tensor(tiles, dtype=torch.int32, device=DEVICE)


def packed(rows: int, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values as a product leaves them: side by side in a row."""
    return list(randn(rows, 3, heads, dim, dtype=dtype).unbind(1))


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (each.double().transpose(0, 1) for each in (q, k, v))
    return ((q @ k.transpose(1, 2) * scale).softmax(-1) @ v).transpose(0, 1)


def test_tiles_begin_where_their_segments_do() -> None:
    assert segment_tiles((3, ROWS + 1)) == [(0, 3, 0), (3, ROWS + 4, 3), (3, ROWS + 4, ROWS + 3)]
    assert segment_tiles(()) == []


@pytest.mark.parametrize("on_triton", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(2, 72), (3, 12)])
def test_every_segment_attends_to_itself(
    heads: int, dim: int, dtype: torch.dtype, on_triton: bool
) -> None:
    q, k, v = packed(sum(LENGTHS), heads, dim, dtype)
    tiles, scale = tiles_of(LENGTHS, extra=2), dim**-0.5
    if on_triton:
        with kernels():
            result = segment_attention(q, k, v, tiles, scale=scale)
    else:
        result = segment_attention(q, k, v, tiles, scale=scale)
    assert result.dtype == dtype and result.is_contiguous()
    begin = 0
    for length in LENGTHS:
        own = slice(begin, begin + length)
        begin += length
        assert_near(result[own], reference(q[own], k[own], v[own], scale), TOLERANCE[dtype])


def test_a_segments_bits_are_those_of_it_alone() -> None:
    """Whatever lies before and behind it, NaN too, and wherever it lies."""
    q, k, v = packed(sum(LENGTHS), 2, 40, torch.float32)
    with row_by_row(), kernels():
        together = segment_attention(q, k, v, tiles_of(LENGTHS, extra=1), scale=0.2)
        begin = 0
        for length in LENGTHS:
            own = slice(begin, begin + length)
            beside = [torch.full((length + 90, 2, 40), float("nan")) for _ in range(3)]
            for room, each in zip(beside, (q, k, v), strict=True):
                room[:length] = each[own]
            a, b, c = beside
            alone = segment_attention(a, b, c, tiles_of((length,), extra=3), scale=0.2)
            assert torch.equal(alone[:length], together[own])
            begin += length


def test_what_does_not_fit_is_named() -> None:
    q, k, v = packed(4, 2, 16, torch.float32)
    with pytest.raises(KernelArgumentError, match="tiles"):
        segment_attention(q, k, v, torch.zeros(2, 3, device=DEVICE), scale=1.0)
    with pytest.raises(KernelArgumentError, match="v"):
        segment_attention(q, k, v[:3], tiles_of((4,)), scale=1.0)
