"""Weights and pools lie in memory that the kernel may give pages of 2 MB, and leave it again."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vlm_serve.kernels import large_pages
from vlm_serve.kernels.large_pages import zeros
from vlm_serve.kernels.linear.dense import PackedChanges, PackedDense
from vlm_serve.kernels.linear.low_rank_factors import LowRankChange, Up
from vlm_serve.kernels.linear.packed_codes import PackedCodes
from vlm_serve.kernels.linear.quantising import quantise

LARGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_large_pages = pytest.mark.skipif(
    sys.platform != "linux" or not LARGE.exists(), reason="a kernel without large pages"
)


def mappings() -> Iterator[tuple[int, int, set[str]]]:
    """Begin, end and flags of the process's memory."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(each, 16) for each in found.groups())
        elif line.startswith("VmFlags:"):
            yield begin, end, set(line.split()[1:])


def advised(tensor: torch.Tensor) -> bool:
    """Whether all of it lies where large pages were asked for."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1
    flags = [own for begin, end, own in mappings() if begin <= last and end > first]
    return bool(flags) and all("hg" in own for own in flags)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.float8_e4m3fn]
)
def test_tensors_are_zero_and_aligned(dtype: torch.dtype) -> None:
    made = [zeros(3, count, dtype=dtype) for count in (1, 7, 64, 1000)]
    for tensor in made:
        assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        assert not tensor.view(torch.uint8).any()
    for value, tensor in enumerate(made):
        tensor.view(torch.uint8).fill_(value + 1)
    for value, tensor in enumerate(made):
        assert bool((tensor.view(torch.uint8) == value + 1).all()), "they overlap"


def test_nothing_has_no_memory() -> None:
    assert zeros(0, 4, dtype=torch.float32).shape == (0, 4)


def test_what_is_larger_than_an_arena_has_one_of_its_own() -> None:
    large = zeros(300 << 20, dtype=torch.uint8)
    large[-1] = 1
    assert large.numel() == 300 << 20 and large.data_ptr() % (2 << 20) == 0


def test_too_much_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="no address space for"):
        zeros(1 << 60, dtype=torch.uint8)


@needs_large_pages
def test_arenas_end_with_their_last_tensor() -> None:
    one = large_pages._Arenas()
    first, second = one.take(5 << 20), one.take(5 << 20)
    address = first.data_ptr()
    assert second.data_ptr() == address + (5 << 20) and advised(first)
    del first
    second.fill_(1)
    assert one.take(8).data_ptr() == address + (10 << 20)
    del second
    assert not any(begin <= address < end and "hg" in own for begin, end, own in mappings())
    assert not one.take(8).any()


def test_what_has_arenas_of_its_own_is_unmapped_alone() -> None:
    before = zeros(1 << 20, dtype=torch.uint8)
    with large_pages.own_arenas():
        inside = zeros(1 << 20, dtype=torch.uint8)
        assert large_pages._arenas._arena is not None
        arena = large_pages._arenas._arena
    behind = zeros(1 << 20, dtype=torch.uint8)
    assert arena() is not None
    del inside
    assert arena() is None
    assert not before.any() and not behind.any()


@needs_large_pages
def test_weights_lie_in_them(compiler: None) -> None:
    plain = torch.randn(96, 128)
    dense = PackedDense.of([plain], 96, 128, torch.float32)
    codes = PackedCodes.of([quantise(plain, 4, 32)], 96, 128)
    for weight in (dense, codes):
        assert all(advised(tensor) for tensor in weight._tensors)


def test_adapters_come_and_go_elsewhere(compiler: None) -> None:
    """An arena goes on, and lasts as long as the weights in it: each change of slots would take
    fresh pages."""
    rank, depth = 4, 256
    change = LowRankChange(
        torch.randn(rank, depth), torch.ones(rank), (Up(0, 0, torch.randn(64, rank)),)
    )
    zeros(64, dtype=torch.uint8)
    before = large_pages._arenas._used
    for _ in range(3):
        assert PackedChanges({0: change}, 1).nbytes >= 4 * rank * depth
    assert large_pages._arenas._used == before
