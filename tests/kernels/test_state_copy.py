"""Row copies: sorted, coalesced, validated."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_case import randn
from kernel_oracles import copy_rows_reference

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.state_copy import coalesce, copy_rows


@pytest.mark.parametrize("seed", range(10))
def test_random_copies_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.sample(range(20), 16)
    dst = rows[: rng.randint(0, 8)]
    src = [rng.choice(rows[8:]) for _ in dst]
    tensors = [randn(20, 3, 4), randn(20, 5, seed=1).bfloat16(), randn(20, 2, 7, seed=2)[:, 1]]
    expected = [copy_rows_reference(tensor, src, dst) for tensor in tensors]
    copy_rows(tensors, src, dst)
    for tensor, want in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, want)


def test_neighbours_are_joined() -> None:
    assert coalesce([4, 9, 3, 5], [11, 2, 10, 12]) == [(3, 10, 3), (9, 2, 1)]
    assert coalesce([0, 1], [5, 4]) == [(0, 5, 1), (1, 4, 1)]
    assert coalesce([2, 2], [6, 7]) == [(2, 6, 1), (2, 7, 1)]
    assert coalesce([], []) == []


@pytest.mark.parametrize(
    ("argument", "src", "dst"),
    [
        ("dst_rows", [0], [1, 2]),
        ("dst_rows", [0, 1], [2, 2]),
        ("dst_rows", [0, 1], [2, 0]),
        ("dst_rows", [0], [4]),
        ("src_rows", [-1], [2]),
        ("src_rows", [4], [2]),
    ],
)
def test_bad_rows_are_named_and_nothing_is_copied(
    argument: str, src: list[int], dst: list[int]
) -> None:
    tensor = randn(4, 2)
    before = tensor.clone()
    with pytest.raises(KernelArgumentError, match=argument) as error:
        copy_rows([tensor], src, dst)
    assert error.value.argument == argument and torch.equal(tensor, before)


def test_tensors_of_different_lengths_are_refused() -> None:
    with pytest.raises(KernelArgumentError, match="tensors"):
        copy_rows([torch.zeros(3, 1), torch.zeros(4, 1)], [0], [1])
