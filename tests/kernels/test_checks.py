"""What the host refuses about a step before anything runs, and what it remembers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vlm_serve.kernels.checks import (
    KernelArgumentError,
    check_meta,
    check_tensor,
)
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta

GOOD = PrefillMeta(
    cu_seqlens=(0, 70, 70, 71),
    starts=(0, 5, 9),
    block_tables=((), (), ()),
    src_rows=(-1, 4, 4),
    dst_rows=(0, 1, 2),
    chunk_ends=((64, 70), (), (71,)),
    snapshots=((0, 0, 5), (2, 0, 6)),
)


def check(**changes: object) -> None:
    # A changed step is a new one: nothing is remembered of the good one.
    check_meta(replace(GOOD, checked=set(), **changes), 71, 8)  # type: ignore[arg-type]


def test_a_good_step_passes_once_and_is_remembered() -> None:
    check()
    check_meta(GOOD, 71, 8)
    assert ("PrefillMeta", 71, 8) in GOOD.checked
    with pytest.raises(KernelArgumentError):
        check_meta(GOOD, 71, 6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cu_seqlens", (0, 70, 71)),
        ("cu_seqlens", (0, 70, 70, 72)),
        ("cu_seqlens", (1, 70, 70, 71)),
        ("cu_seqlens", (0, 71, 70, 71)),
        ("src_rows", (-1, 4)),
        ("chunk_ends", ((70,), (), (71,))),
        ("chunk_ends", ((64, 64, 70), (), (71,))),
        ("chunk_ends", ((64, 69), (), (71,))),
        ("chunk_ends", ((64, 70), (70,), (71,))),
        ("src_rows", (-2, 4, 4)),
        ("src_rows", (-1, 8, 4)),
        ("src_rows", (1, 4, 4)),
        ("src_rows", (0, 0, 4)),
        ("src_rows", (5, 4, 4)),
        ("dst_rows", (0, 1, 1)),
        ("dst_rows", (0, 1, 8)),
        ("dst_rows", (-1, 1, 2)),
        ("snapshots", ((0, 2, 5),)),
        ("snapshots", ((1, 0, 5),)),
        ("snapshots", ((3, 0, 5),)),
        ("snapshots", ((0, 0, 0),)),
        ("snapshots", ((0, 0, 8),)),
        ("snapshots", ((0, 0, 5), (2, 0, 5))),
        ("snapshots", ((0, 0, 5), (0, 0, 6))),
    ],
)
def test_a_bad_prefill_step_is_refused(field: str, value: object) -> None:
    with pytest.raises(KernelArgumentError, match=f"meta.{field}"):
        check(**{field: value})


def test_rows_may_be_updated_in_place() -> None:
    check(src_rows=(0, 1, 4))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("src_rows", (0,)),
        ("dst_rows", (3, 3)),
        ("dst_rows", (3, 9)),
        ("snapshot_rows", (-1, 9)),
        ("snapshot_rows", (4, -1)),
        ("src_rows", (4, 4)),
    ],
)
def test_a_bad_decode_step_is_refused(field: str, value: object) -> None:
    good = DecodeMeta(((), ()), (1, 1), (0, 4), (3, 4), (-1, 5))
    check_meta(good, 2, 8)
    changed = replace(good, checked=set(), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(KernelArgumentError, match="meta."):
        check_meta(changed, 2, 8)


def test_tensors_are_checked_by_name() -> None:
    device = torch.device("cpu")
    x = torch.zeros(2, 3)
    check_tensor("x", x, (None, 3), (torch.float32,), device)
    for tensor, problem in (
        (x[0], "shape"),
        (x.half(), "dtype"),
        (torch.zeros(3, 3).T[:2], "stride"),
        (torch.zeros(2, 3, device="meta"), "meta"),
    ):
        with pytest.raises(KernelArgumentError, match=f"x: .*{problem}"):
            check_tensor("x", tensor, (None, 3), (torch.float32,), device)
