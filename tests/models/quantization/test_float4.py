"""FP4 as compressed-tensors writes it and as ModelOpt lays it out."""

from __future__ import annotations

import pytest
import quantised_oracles
import torch
from memory_checkpoint import MemoryCheckpoint
from quantised_codes import dequantised, generator

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part, Shard
from vlm_serve.kernels.linear.codes import IntegerCodes
from vlm_serve.models.quantization.base import Names, pieces
from vlm_serve.models.quantization.float4 import MODELOPT_NVFP4, MXFP4, NVFP4, Float4

ROWS, DEPTH = 96, 256
PART = Part("w.weight", (ROWS, DEPTH))
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KINDS: dict[str, Float4] = {
    "nvfp4": NVFP4,
    "nvfp4-modelopt": MODELOPT_NVFP4,
    "mxfp4": MXFP4,
}


def written(kind: str) -> tuple[MemoryCheckpoint, torch.Tensor]:
    """A weight of random numbers that the format holds, which compressed-tensors has packed, and
    the weight as that reads it, float32."""
    known, draw = quantised_oracles.compressed_tensors(), generator(1)
    own = kind.removesuffix("-modelopt")
    scheme = quantised_oracles.float4_scheme(own)
    groups = (ROWS, DEPTH // KINDS[kind].group)
    exponents = torch.randint(-6, 4, groups, generator=draw)
    scale = torch.ldexp(torch.ones(groups), exponents)
    if own == "nvfp4":
        scale *= torch.randint(8, 16, groups, generator=draw) / 8
    places = torch.randint(0, 8, (ROWS, DEPTH), generator=draw)
    signs = 1 - 2 * torch.randint(0, 2, (ROWS, DEPTH), generator=draw)
    wide = scale.repeat_interleave(KINDS[kind].group, 1)
    state = {"weight": torch.tensor(NUMBERS)[places] * signs * wide, "weight_scale": scale}
    if own == "nvfp4":
        state["weight"] /= 24
        state["weight_global_scale"] = torch.tensor([24.0])
    compressor = known.BaseCompressor.get_value_from_registry(scheme.format)
    packed = compressor.compress(state, scheme)
    weight = quantised_oracles.float4(packed, scheme)
    assert torch.allclose(weight, state["weight"])
    if kind == "nvfp4-modelopt":
        packed = {
            "weight": packed["weight_packed"],
            "weight_scale": packed["weight_scale"],
            "weight_scale_2": 1 / packed["weight_global_scale"][0],
        }
    return MemoryCheckpoint({f"w.{name}": each for name, each in packed.items()}), weight


def read(kind: str, tensors: MemoryCheckpoint, part: Part, shard: Shard | None) -> torch.Tensor:
    found = [*pieces(KINDS[kind].open(tensors, part), part, shard)]
    assert all(isinstance(each, IntegerCodes) and each.float4 for each in found)
    return torch.cat([dequantised(each) for each in found])


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str) -> None:
    tensors, weight = written(kind)
    torch.testing.assert_close(read(kind, tensors, PART, None).float(), weight, rtol=3e-7, atol=0)
    assert KINDS[kind].holds(tensors, Names("w.weight"))
    stored = sum(each.nbytes for each in tensors.values())
    assert KINDS[kind].nbytes(ROWS, DEPTH) == pytest.approx(stored, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
def test_ranges_and_shards(kind: str, axis: int) -> None:
    """Ranges of rows, and shards that cut groups."""
    tensors, _ = written(kind)
    ranges = (range(5, 21), range(40, 41), range(64, 79))
    whole = read(kind, tensors, PART, None)
    rows = torch.cat([whole[each.start : each.stop] for each in ranges])
    part = Part("w.weight", (ROWS, DEPTH), ranges)
    size = 2 if axis == 0 else 32
    got = [read(kind, tensors, part, Shard(rank, size, axis)) for rank in range(size)]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(got, dim=axis), rows)


def test_a_dense_weight_of_modelopts_is_none() -> None:
    tensors = MemoryCheckpoint({"w.weight": torch.zeros(ROWS, DEPTH, dtype=torch.bfloat16)})
    assert not MODELOPT_NVFP4.holds(tensors, Names("w.weight"))


def e4m3(value: float) -> torch.Tensor:
    return torch.full((ROWS, DEPTH // 16), value).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "complaint"),
    [
        ("nvfp4", "weight_scale", None, "the checkpoint has no w.weight_scale"),
        ("nvfp4", "weight_scale", e4m3(float("nan")), "w.weight_scale holds scales that are NaN"),
        ("nvfp4", "weight_scale", e4m3(-1), "w.weight_scale holds negative scales"),
        ("nvfp4", "weight_scale", e4m3(1)[1:], "w.weight_scale has shape .95, 16., the config"),
        ("nvfp4", "weight_scale", e4m3(1).float(), "is float32, its format has float8_e4m3fn"),
        ("nvfp4", "weight_global_scale", None, "has no w.weight_global_scale"),
        ("nvfp4", "weight_global_scale", torch.zeros(1), "w.weight_global_scale is 0.0, expected"),
        ("nvfp4", "weight_global_scale", torch.tensor([-1.0]), "weight_global_scale is -1.0"),
        ("nvfp4", "weight_global_scale", torch.tensor(float("nan")), "weight_global_scale is nan"),
        ("nvfp4", "weight_global_scale", torch.ones(2), "weight_global_scale has shape"),
        ("nvfp4-modelopt", "weight_scale_2", None, "has no w.weight_scale_2"),
        ("nvfp4-modelopt", "weight_scale_2", torch.tensor(float("inf")), "scale_2 is inf"),
        ("nvfp4-modelopt", "weight", torch.zeros(ROWS, DEPTH), "w.weight has shape"),
        ("mxfp4", "weight_scale", torch.full((ROWS, DEPTH // 32), 255).byte(), "that are NaN"),
        ("mxfp4", "weight_scale", e4m3(1)[:, ::2], "is float8_e4m3fn, its format has uint8 or"),
        ("mxfp4", "weight_packed", torch.zeros(ROWS, DEPTH // 2).int(), "is int32, its format has"),
    ],
)
def test_what_is_not_sound(
    kind: str, name: str, tensor: torch.Tensor | None, complaint: str
) -> None:
    tensors, _ = written(kind)
    del tensors[f"w.{name}"]
    if tensor is not None:
        tensors[f"w.{name}"] = tensor
    with pytest.raises(CheckpointError, match=complaint):
        KINDS[kind].open(tensors, PART)


def test_scales_of_zero_are_legitimate() -> None:
    tensors, _ = written("nvfp4-modelopt")
    tensors["w.weight_scale_2"] = torch.tensor(0.0)
    assert not read("nvfp4-modelopt", tensors, PART, None).any()
    tensors, _ = written("nvfp4")
    tensors["w.weight_scale"] = e4m3(-0.0)
    assert not read("nvfp4", tensors, PART, None).any()


def test_columns_that_groups_do_not_fill() -> None:
    with pytest.raises(CheckpointError, match="groups of 32 do not fit the 48 columns of w.weight"):
        MXFP4.open(MemoryCheckpoint(), Part("w.weight", (ROWS, 48)))


def test_exponents_of_a_type_of_their_own() -> None:
    tensors, weight = written("mxfp4")
    tensors["w.weight_scale"] = tensors["w.weight_scale"].view(torch.float8_e8m0fnu)
    assert torch.equal(read("mxfp4", tensors, PART, None).float(), weight)
