"""Writing pages on the Triton path: the bits of the CPU path, whatever the stored form."""

from __future__ import annotations

import pytest
import torch
from triton_case import DEVICE, kernels, randn
from triton_pools import FORMS, layer

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.kv_quant import quantise, to_float8
from vlm_serve.kernels.kv_write import copy_kv_rows, write_kv
from vlm_serve.kernels.metadata import KVLayer
from vlm_serve.kernels.triton_support import interpreted


def stored(kv: KVLayer) -> list[torch.Tensor]:
    """Every part of the pages as values, NaN as 1e6."""
    parts = (kv.k, kv.v, kv.k_scale, kv.k_zero, kv.v_scale, kv.v_zero)
    return [part.cpu().double().nan_to_num(nan=1e6) for part in parts if part is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 40)])
def test_pages_hold_the_bits_of_the_cpu_path(
    dtype: torch.dtype, form: torch.dtype, heads: int, dim: int
) -> None:
    wide = randn(7, 2, heads, dim + 8, dtype=dtype) * 100
    wide[2] = 0
    k, v = wide[:, 0, :, :dim], wide[:, 1, :, :dim]
    slots = torch.tensor([13, -1, 0, 7, 19, -1, 12], device=DEVICE)
    got, expected = layer(form, heads, dim), layer(form, heads, dim, torch.device("cpu"))
    with kernels():
        write_kv(k, v, got[0], slots)
    write_kv(k.cpu(), v.cpu(), expected[0], slots.cpu())
    # The interpreter cuts float32 to bfloat16 where a GPU rounds.
    cut = interpreted() and (dtype, form) == (torch.float32, torch.bfloat16)
    for ours, theirs in zip(stored(got[0]), stored(expected[0]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7 if cut else 0, atol=0)
    other_layer = [
        pool[:, 0].cpu().contiguous().view(torch.uint8) for _, pool, _ in (got, expected)
    ]
    assert torch.equal(*other_layer)


def test_float8_conversion_is_torchs_at_every_code_and_between() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()].sort().values
    halves = (finite[1:] + finite[:-1]) / 2
    edges = torch.tensor([449.0, 1e30, -1e30, float("inf"), float("nan"), 2**-10, 3e-4, 0.0])
    values = torch.cat([finite, halves, halves * (1 + 2**-20), halves * (1 - 2**-20), edges])
    values = torch.nn.functional.pad(values, (0, -values.numel() % 64)).view(-1, 1, 64).to(DEVICE)
    count = values.shape[0]
    pages = torch.zeros(2, count, 1, 1, 64, dtype=torch.float8_e4m3fn, device=DEVICE)
    with kernels():
        write_kv(values, values, KVLayer(pages[0], pages[1]), torch.arange(count, device=DEVICE))
    found = pages[0].view(-1, 1, 64).cpu()
    wanted = to_float8(values.cpu())
    same = found.view(torch.uint8) == wanted.view(torch.uint8)
    assert bool((same | (found.float().isnan() & wanted.float().isnan())).all())


def test_quantisation_keeps_ranges_that_touch_the_ends_of_half_precision() -> None:
    k = torch.zeros(3, 1, 64, device=DEVICE)
    k[0, 0, 0], k[1, 0, :2], k[2, 0, 0] = 1e-7, torch.tensor([-65000.0, 65000.0]), -3.0
    kv, _, _ = layer(torch.uint8, 1, 64)
    with kernels():
        write_kv(k, k, kv, torch.arange(3, device=DEVICE))
    codes, scale, zero = quantise(k.cpu())
    assert kv.k_scale is not None and kv.k_zero is not None
    assert torch.equal(kv.k.reshape(-1, 1, 64)[:3].cpu(), codes)
    assert torch.equal(kv.k_scale.reshape(-1, 1)[:3].cpu(), scale)
    assert torch.equal(kv.k_zero.reshape(-1, 1)[:3].cpu(), zero)


@pytest.mark.parametrize("form", FORMS)
def test_copied_rows_arrive_in_every_layer_and_the_rest_stays(form: torch.dtype) -> None:
    shape = (6, 3, 2, 4, 2, 24)
    bits = torch.randint(0, 256, (*shape, form.itemsize), dtype=torch.uint8, device=DEVICE)
    pool = bits.view(form).squeeze(-1)
    scales = randn(6, 3, 4, 4, 2, dtype=torch.float16) if form == torch.uint8 else None
    expected = pool.cpu().clone(), None if scales is None else scales.cpu().clone()
    copies = [(4, 0, 3), (4, 2, 1), (1, 5, 4)]
    copy_kv_rows(*expected, copies)
    with kernels():
        copy_kv_rows(pool, scales, copies)
    assert torch.equal(pool.cpu().view(torch.uint8), expected[0].view(torch.uint8))
    if scales is not None and expected[1] is not None:
        assert torch.equal(scales.cpu(), expected[1])


def test_layouts_the_kernels_do_not_take_are_refused() -> None:
    pages = torch.zeros(2, 4, 1, 64, device=DEVICE)
    other = torch.zeros(2, 8, 1, 64, device=DEVICE)[:, ::2]
    with kernels(), pytest.raises(KernelArgumentError, match=r"kv\.v"):
        write_kv(
            torch.zeros(1, 1, 64, device=DEVICE),
            torch.zeros(1, 1, 64, device=DEVICE),
            KVLayer(pages, other),
            torch.zeros(1, dtype=torch.int64, device=DEVICE),
        )
