"""Writing keys and values: as stored, quantised, skipped, copied."""

from __future__ import annotations

import pytest
import torch
from kernel_case import randn, same

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.kv_quant import dequantise, quantise, round_up_half
from vlm_serve.kernels.kv_write import copy_kv_rows, write_kv
from vlm_serve.kernels.metadata import KVLayer

BLOCKS, SIZE, HEADS, DIM = 5, 8, 2, 16


def pages(dtype: torch.dtype) -> KVLayer:
    pool = torch.full((BLOCKS, 2, 2, SIZE, HEADS, DIM), 7.0).to(dtype)
    if dtype != torch.uint8:
        return KVLayer(pool[:, 1, 0], pool[:, 1, 1])
    scales = torch.full((BLOCKS, 2, 4, SIZE, HEADS), 3.0, dtype=torch.float16)
    return KVLayer(pool[:, 1, 0], pool[:, 1, 1], *(scales[:, 1, i] for i in range(4)))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_go_to_their_slots_and_nowhere_else(
    source: torch.dtype, stored: torch.dtype
) -> None:
    kv = pages(stored)
    fused = randn(6, 2 * HEADS * DIM, dtype=source)
    k, v = (part.view(6, HEADS, DIM) for part in fused.chunk(2, dim=1))
    slots = torch.tensor([3 * SIZE + 7, -1, 0, 4 * SIZE, -1, SIZE + 2])
    write_kv(k, v, kv, slots)
    kept = torch.ones(BLOCKS * SIZE, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(kv.k[slot // SIZE, slot % SIZE], k[token].to(stored))
            assert torch.equal(kv.v[slot // SIZE, slot % SIZE], v[token].to(stored))
            kept[slot] = False
    assert (kv.k.flatten(0, 1)[kept] == 7).all() and (kv.v.flatten(0, 1)[kept] == 7).all()


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_nothing_to_write(slots: list[int]) -> None:
    kv = pages(torch.float32)
    k = randn(len(slots), HEADS, DIM)
    write_kv(k, k, kv, torch.tensor(slots, dtype=torch.int64))
    assert (kv.k == 7).all()


def test_float8_saturates() -> None:
    kv = pages(torch.float8_e4m3fn)
    k = randn(1, HEADS, DIM) * 10
    k[0, 0, :3] = torch.tensor([1e6, -1e6, 449.0])
    write_kv(k, -k, kv, torch.tensor([9]))
    stored = kv.k[1, 1].float()
    assert stored[0, :3].tolist() == [448.0, -448.0, 448.0]
    torch.testing.assert_close(stored, k[0].clamp(-448, 448), rtol=0.07, atol=0.01)
    assert torch.equal(kv.v[1, 1].float(), -stored)


def test_int8_keeps_every_value_within_its_step() -> None:
    kv = pages(torch.uint8)
    k, v = randn(4, HEADS, DIM) * 3 + 1, randn(4, HEADS, DIM, seed=1) * 1e-4
    write_kv(k, v, kv, torch.tensor([0, 1, SIZE, SIZE + 1]))
    assert kv.k_scale is not None and kv.k_zero is not None
    assert kv.v_scale is not None and kv.v_zero is not None
    for x, codes, scale, zero in (
        (k, kv.k, kv.k_scale, kv.k_zero),
        (v, kv.v, kv.v_scale, kv.v_zero),
    ):
        back = dequantise(codes[:2, :2], scale[:2, :2], zero[:2, :2], torch.float32)
        step = scale[:2, :2].float().unsqueeze(-1)
        assert ((back.flatten(0, 1) - x).abs() <= 0.51 * step.flatten(0, 1)).all()
    assert (kv.k[2:] == 7).all() and (kv.k_scale[2:] == 3).all()


@pytest.mark.parametrize(
    "row",
    [
        [0.0] * 4,
        [5.0] * 4,
        [-2.0, -2.0, -2.0, -1.0],
        [1e-7, 0.0, -1e-7, 0.0],
        [3e4, -3e4, 1.0, 0.0],
        [0.25, 0.5, 0.125, 0.0],
    ],
)
def test_quantised_extremes(row: list[float]) -> None:
    x = torch.tensor(row)
    codes, scale, zero = quantise(x)
    assert 0 <= float(zero) <= 255 and float(zero).is_integer()
    back = dequantise(codes, scale, zero, torch.float64)
    error = (back - x.double()).abs().max()
    assert error <= 0.51 * float(scale) or float(x.abs().max()) < 255 * 2**-25
    assert (back[x == 0] == 0).all(), "zero is exact"


def test_half_precision_rounds_up() -> None:
    x = torch.cat([torch.rand(2000), torch.rand(2000) * 1e-6, torch.tensor([0.0, 65504.0])])
    half = round_up_half(x)
    below = (half.view(torch.int16) - 1).view(torch.float16).float()
    assert (half.float() >= x).all() and (below[x > 0] < x[x > 0]).all()


def test_rows_of_blocks_are_copied_in_every_layer() -> None:
    pool = randn(BLOCKS, 3, 2, SIZE, HEADS, DIM)
    scales = randn(BLOCKS, 3, 4, SIZE, HEADS).half()
    before, scales_before = pool.clone(), scales.clone()
    copy_kv_rows(pool, scales, [(1, 0, 3), (1, 4, 8), (2, 3, 0)])
    before[0, :, :, :3], before[4] = before[1, :, :, :3], before[1]
    scales_before[0, :, :, :3], scales_before[4] = scales_before[1, :, :, :3], scales_before[1]
    assert same(pool, before) and torch.equal(scales, scales_before)


def test_bad_arguments_are_named() -> None:
    kv, k = pages(torch.float32), randn(2, HEADS, DIM)
    slots = torch.tensor([0, 1])
    for name, arguments in {
        "k": (k[:, :1], k, kv, slots),
        "v": (k, k[:1], kv, slots),
        "slots": (k, k, kv, slots.int()),
        "kv.v": (k, k, KVLayer(kv.k, kv.v.half()), slots),
        "kv.k_scale": (k, k, KVLayer(kv.k.byte(), kv.v.byte()), slots),
    }.items():
        with pytest.raises(KernelArgumentError, match=name) as error:
            write_kv(*arguments)
        assert error.value.argument == name
    pool = torch.zeros(BLOCKS, 1, 2, SIZE, HEADS, DIM)
    for copies in (
        [(0, 5, 1)],
        [(-1, 0, 1)],
        [(0, 1, 9)],
        [(0, 2, 1), (1, 2, 1)],
        [(0, 1, 1), (1, 2, 1)],
    ):
        with pytest.raises(KernelArgumentError, match="copies"):
            copy_kv_rows(pool, None, copies)
