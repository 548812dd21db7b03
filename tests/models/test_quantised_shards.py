"""Shards of weights that are quantised while they are loaded: parts of what the whole has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vlm_serve.kernels.linear import Part, Shard
from vlm_serve.kernels.linear.codes import IntegerCodes, scale_values
from vlm_serve.models.weights import Weights

ROWS, DEPTH = 96, 384
NAME = "mlp.down_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose weight has larger values the further on in a row they are."""
    path = tmp_path_factory.mktemp("shards")
    weight = torch.randn(ROWS, DEPTH, generator=torch.Generator().manual_seed(0))
    weight = (weight * torch.logspace(-4, 0, DEPTH)).bfloat16()
    tensors = {"embed_tokens.weight": torch.zeros(1, 1), NAME: weight, "t": weight.T.contiguous()}
    save_file(tensors, path / "model.safetensors")
    return path


def codes(path: Path, bits: int, shard: Shard | None, *, transposed: bool = False) -> IntegerCodes:
    weights = Weights(path, torch.bfloat16, torch.device("cpu"), bits=bits)
    part = Part(NAME, (ROWS, DEPTH), least_bits=4)
    if transposed:
        part = Part("t", (DEPTH, ROWS), transposed=True, least_bits=4)
    pieces = weights.codes(part, shard)
    assert pieces is not None
    (found,) = pieces
    assert isinstance(found, IntegerCodes)
    return found


def wide_scales(codes: IntegerCodes) -> torch.Tensor:
    """Of every value."""
    return scale_values(codes.scales, codes.factors).repeat_interleave(codes.group, 1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_shards_have_the_codes_and_scales_of_the_whole(
    checkpoint: Path, bits: int, size: int, transposed: bool
) -> None:
    """Of rows, and of their depth, also where that cuts through groups."""
    whole = codes(checkpoint, bits, None)
    assert (whole.factors is not None) == (bits == 4)
    for axis in (0, 1):
        shards = [
            codes(checkpoint, bits, Shard(rank, size, axis), transposed=transposed)
            for rank in range(size)
        ]
        assert torch.equal(torch.cat([each.codes for each in shards], axis), whole.codes)
        scales = torch.cat([wide_scales(each) for each in shards], axis)
        assert torch.equal(scales, wide_scales(whole))
