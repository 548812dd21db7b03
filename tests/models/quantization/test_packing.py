"""The bytes that compressed-tensors, AutoGPTQ and AutoAWQ write are read as the codes they stand
for: whole, in rows and ranges, and in shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import quantised_oracles
import torch
from memory_checkpoint import MemoryCheckpoint

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear import Part, Shard
from vlm_serve.kernels.linear.codes import Codes, Float8Codes, IntegerCodes
from vlm_serve.models.quantization.base import Format, Names, pieces
from vlm_serve.models.quantization.float8 import Float8
from vlm_serve.models.quantization.integers import Awq, Gptq, Packed

ROWS, DEPTH, GROUP = 96, 256, 64
Tensors = dict[str, torch.Tensor]


@dataclass
class Drawn:
    """Random codes, what they stand for, and the tensors that an oracle made of them."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    weight: torch.Tensor


def draw(bits: int, *, symmetric: bool, group: int = GROUP) -> Drawn:
    """Every code and every zero point occurs; scales are exact in float16 and bfloat16."""
    generator, top = torch.Generator().manual_seed(bits), 1 << bits
    codes = torch.randint(0, top, (ROWS, DEPTH), generator=generator)
    shape = (ROWS, DEPTH // group)
    scales = 2.0 ** torch.randint(-6, -3, shape, generator=generator)
    # AutoGPTQ cannot pack a zero point of 0.
    zeros = torch.randint(1, top, shape, generator=generator)
    zeros = torch.full(shape, top // 2) if symmetric else zeros
    wide = (codes - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)
    return Drawn(codes.byte(), scales, zeros.byte(), wide)


def by_gptq(drawn: Drawn, bits: int, group: int) -> Tensors:
    """Written by AutoGPTQ."""
    layer = quantised_oracles.gptq_layer(bits, group, DEPTH, ROWS)
    linear = torch.nn.Linear(DEPTH, ROWS, bias=False)
    linear.weight.data = drawn.weight
    layer.pack(linear, drawn.scales, drawn.zeros.float(), None)
    return {f"w.{name}": tensor for name, tensor in layer.state_dict().items()}


def by_awq(drawn: Drawn, group: int) -> Tensors:
    """Written by AutoAWQ."""
    linear = torch.nn.Linear(DEPTH, ROWS, bias=False)
    linear.weight.data = drawn.weight
    layer = quantised_oracles.awq_layer().from_linear(
        linear, 4, group, scales=drawn.scales.T.contiguous(), zeros=drawn.zeros.T.contiguous()
    )
    return {f"w.{name}": tensor for name, tensor in layer.state_dict().items()}


def by_compressed_tensors(drawn: Drawn, bits: int, strategy: str, *, symmetric: bool) -> Tensors:
    """Written by compressed-tensors."""
    known = quantised_oracles.compressed_tensors()
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    if strategy == "group":
        weights["group_size"] = GROUP
    scheme = known.QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    half = 1 << (bits - 1)
    state = {
        "weight": drawn.weight,
        "weight_scale": drawn.scales,
        "weight_zero_point": (drawn.zeros.int() - half).to(torch.int8),
    }
    compressor = known.BaseCompressor.get_value_from_registry("pack-quantized")
    return {f"w.{name}": each for name, each in compressor.compress(state, scheme).items()}


def gptq(bits: int, group: int = GROUP) -> tuple[Format, Tensors, Drawn]:
    drawn = draw(bits, symmetric=False, group=group)
    return Gptq(bits, group, 1, False), by_gptq(drawn, bits, group), drawn


def awq(group: int = GROUP) -> tuple[Format, Tensors, Drawn]:
    drawn = draw(4, symmetric=False, group=group)
    return Awq(4, group), by_awq(drawn, group), drawn


def packed(bits: int, strategy: str, *, symmetric: bool) -> tuple[Format, Tensors, Drawn]:
    group = GROUP if strategy == "group" else DEPTH
    drawn = draw(bits, symmetric=symmetric, group=group)
    tensors = by_compressed_tensors(drawn, bits, strategy, symmetric=symmetric)
    return Packed(bits, group if group < DEPTH else -1, symmetric), tensors, drawn


CASES: dict[str, Callable[[], tuple[Format, Tensors, Drawn]]] = {
    "gptq int4": lambda: gptq(4),
    "gptq int8": lambda: gptq(8),
    "gptq int4 in small groups": lambda: gptq(4, 32),
    "awq": awq,
    "awq in groups of 128": lambda: awq(128),
    **{
        f"int{bits} {strategy} {'' if symmetric else 'a'}symmetric": partial(
            packed, bits, strategy, symmetric=symmetric
        )
        for bits in (4, 8)
        for strategy in ("group", "channel")
        for symmetric in (True, False)
    },
}


def plain(codes: Codes) -> torch.Tensor:
    """What codes stand for, by their definition."""
    if isinstance(codes, Float8Codes):
        factors = codes.scales.float().repeat_interleave(codes.block[0], 0)
        factors = factors.repeat_interleave(codes.block[1], 1)
        return codes.codes.float() * factors[: codes.codes.shape[0], : codes.codes.shape[1]]
    group, half = codes.group, 1 << (codes.bits - 1)
    zeros = codes.zeros if codes.zeros is not None else torch.full(codes.scales.shape, half)
    assert int(codes.codes.max()) < 1 << codes.bits
    assert codes.codes.shape[1] == group * codes.scales.shape[1]
    wide = codes.codes.float() - zeros.float().repeat_interleave(group, 1)
    return wide * codes.scales.float().repeat_interleave(group, 1)


def float8(codes: Codes) -> Float8Codes:
    assert isinstance(codes, Float8Codes)
    return codes


def read(format_: Format, tensors: Tensors, part: Part, shard: Shard | None) -> torch.Tensor:
    opened = format_.open(MemoryCheckpoint(tensors), part)
    return torch.cat([plain(piece) for piece in pieces(opened, part, shard)])


@pytest.mark.parametrize("name", CASES)
def test_codes_scales_and_zero_points(name: str) -> None:
    format_, tensors, drawn = CASES[name]()
    part = Part("w.weight", (ROWS, DEPTH))
    (piece,) = pieces(format_.open(MemoryCheckpoint(tensors), part), part, None)
    assert isinstance(piece, IntegerCodes)
    assert torch.equal(piece.codes, drawn.codes)
    assert torch.equal(piece.scales.float(), drawn.scales)
    if piece.zeros is None:
        assert "asymmetric" not in name and "symmetric" in name
    else:
        assert torch.equal(piece.zeros, drawn.zeros)
    assert format_.holds(MemoryCheckpoint(tensors), Names("w.weight"))
    stored = sum(each.nbytes for key, each in tensors.items() if "g_idx" not in key)
    # The oracles' scales are float32 here and those of checkpoints are not; zero points of 4 bits
    # take a byte in memory.
    stored -= sum(2 * each.numel() for each in tensors.values() if each.dtype == torch.float32)
    assert format_.nbytes(ROWS, DEPTH) == pytest.approx(stored, rel=0.05)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("axis", [0, 1])
def test_ranges_and_shards(name: str, axis: int) -> None:
    """Ranges that no word's end meets, and shards that cut groups."""
    format_, tensors, drawn = CASES[name]()
    ranges = (range(5, 21), range(40, 41), range(64, 79))
    part = Part("w.weight", (ROWS, DEPTH), ranges)
    rows = torch.cat([drawn.weight[each.start : each.stop] for each in ranges])
    assert torch.equal(read(format_, tensors, part, None), rows)
    size = 2 if axis == 0 else 8
    got = [read(format_, tensors, part, Shard(rank, size, axis)) for rank in range(size)]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(got, dim=axis), rows)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [(128, 128), (64, 32), None])
def test_float8_blocks_and_channels(block: tuple[int, int] | None, transposed: bool) -> None:
    """Rows and columns that blocks do not divide; the definition is its own oracle."""
    rows, depth = 200, 300
    shape = (3, depth, rows) if transposed else (3, rows, depth)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    if block is None:
        grid = (3, 1, rows) if transposed else (3, rows, 1)
        own = (depth, 1) if transposed else (1, depth)
    else:
        grid, own = (3, -(-shape[1] // block[0]), -(-shape[2] // block[1])), block
    factors = torch.rand(grid, generator=generator).bfloat16()
    tensors = {"e.gate_up_proj": codes, "e.gate_up_proj_scale_inv": factors}
    wide = factors.float().repeat_interleave(own[0], 1).repeat_interleave(own[1], 2)
    weight = (codes.float() * wide[:, : shape[1], : shape[2]])[1]
    weight = weight.T if transposed else weight
    ranges = (range(3, 70), range(128, 200))
    part = Part("e.gate_up_proj", shape, ranges, index=1, transposed=transposed)
    expected = torch.cat([weight[3:70], weight[128:200]])
    assert torch.equal(read(Float8(block), tensors, part, None), expected)
    opened = Float8(block).open(MemoryCheckpoint(tensors), part)
    assert len({piece.block for piece in map(float8, pieces(opened, part, None))}) == 1
    for rank in range(4):
        half = slice(75 * rank, 75 * rank + 75)
        got = read(Float8(block), tensors, part, Shard(rank, 4, 1))
        assert torch.equal(got, expected[:, half])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_a_whole_weight(shape: tuple[int, ...]) -> None:
    codes = torch.randn(24, 16).to(torch.float8_e4m3fn)
    tensors = {"w.weight": codes, "w.weight_scale": torch.full(shape, 0.25)}
    got = read(Float8(None), tensors, Part("w.weight", (24, 16)), None)
    assert torch.equal(got, codes.float() * 0.25)


def test_pieces_of_large_weights_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_serve.models.quantization.base.PIECE_BYTES", 40 * DEPTH)
    format_, tensors, drawn = gptq(4)
    part = Part("w.weight", (ROWS, DEPTH))
    found = list(pieces(format_.open(MemoryCheckpoint(tensors), part), part, None))
    assert [len(each.codes) for each in found] == [40, 40, 16]
    assert torch.equal(torch.cat([plain(each) for each in found]), drawn.weight)
    blocks = {"w.weight": torch.zeros(ROWS, DEPTH).to(torch.float8_e4m3fn)}
    blocks["w.weight_scale_inv"] = torch.ones(math.ceil(ROWS / 32), DEPTH // 32)
    found = list(pieces(Float8((32, 32)).open(MemoryCheckpoint(blocks), part), part, None))
    assert [len(each.codes) for each in found] == [32, 32, 32], "whole blocks"


def test_the_second_version_of_gptq_stores_zero_points_as_they_are() -> None:
    """Of AutoGPTQ's bytes, which are of the first one."""
    drawn = draw(4, symmetric=True)
    first = by_gptq(drawn, 4, GROUP)
    second = first | {"w.qzeros": first["w.qzeros"] + 0x11111111}
    part = Part("w.weight", (ROWS, DEPTH))
    for offset, tensors in ((1, first), (0, second)):
        assert torch.equal(read(Gptq(4, GROUP, offset, True), tensors, part, None), drawn.weight)
    for offset, tensors in ((0, first), (1, second)):
        with pytest.raises(CheckpointError, match="w.qzeros are not those of symmetric weights"):
            Gptq(4, GROUP, offset, True).open(MemoryCheckpoint(tensors), part)


def test_columns_ordered_by_activation_are_refused() -> None:
    format_, tensors, _ = gptq(4)
    tensors["w.g_idx"] = tensors["w.g_idx"].flip(0)
    complaint = r"w.g_idx orders columns by activation \(desc_act\), .*: serve the checkpoint"
    with pytest.raises(CheckpointError, match=complaint):
        format_.open(MemoryCheckpoint(tensors), Part("w.weight", (ROWS, DEPTH)))
    packed_, tensors, _ = packed(4, "group", symmetric=True)
    tensors["w.weight_g_idx"] = torch.arange(DEPTH).flip(0) // GROUP
    with pytest.raises(CheckpointError, match="w.weight_g_idx orders columns by activation"):
        packed_.open(MemoryCheckpoint(tensors), Part("w.weight", (ROWS, DEPTH)))


def test_float8_in_groups_along_a_row() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(ROWS, DEPTH, generator=generator).to(torch.float8_e4m3fn)
    factors = torch.rand(ROWS, DEPTH // 128, generator=generator).bfloat16()
    tensors = {"w.weight": codes, "w.weight_scale": factors}
    weight = codes.float() * factors.float().repeat_interleave(128, 1)
    part = Part("w.weight", (ROWS, DEPTH))
    assert torch.equal(read(Float8((1, 128)), tensors, part, None), weight)
    got = [read(Float8((1, 128)), tensors, part, Shard(rank, 4, 1)) for rank in range(4)]
    assert torch.equal(torch.cat(got, dim=1), weight)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_what_is_repacked_for_marlin_is_refused(kind: str) -> None:
    """Marlin's words of 16 x 16 tiles have another shape than those of either writer."""
    format_, tensors, _ = gptq(4) if kind == "gptq" else awq()
    tensors["w.qweight"] = tensors["w.qweight"].reshape(DEPTH // 16, ROWS * 2)
    with pytest.raises(CheckpointError, match="w.qweight has shape"):
        format_.open(MemoryCheckpoint(tensors), Part("w.weight", (ROWS, DEPTH)))
