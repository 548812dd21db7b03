"""Projections loaded from parts that are codes: alike, of several formats, beside dense ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F

from vlm_serve.kernels.linear import Joined, Linear, Part, Shard, load
from vlm_serve.kernels.linear.codes import Codes, Float8Codes, IntegerCodes
from vlm_serve.kernels.linear.packed_codes import PackedCodes
from vlm_serve.kernels.linear.quantising import quantise

DEPTH, ROWS = 64, 40

pytestmark = pytest.mark.usefixtures("compiler")


class Source:
    """A checkpoint in memory: dense tensors, and the pieces of codes."""

    def __init__(self, compiled: bool, **parts: torch.Tensor | Sequence[Codes]) -> None:
        self.dtype, self.device, self.compiled = torch.float32, torch.device("cpu"), compiled
        self.dynamic = False
        self._parts = parts

    def mapped(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        found = self._parts[name]
        assert isinstance(found, torch.Tensor) and found.shape == tuple(shape)
        return found

    def codes(self, part: Part, shard: Shard | None) -> Iterator[Codes] | None:
        found = self._parts[part.name]
        return None if isinstance(found, torch.Tensor) else iter(found)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(rows: int, *, seed: int, bits: int = 4, zeros: bool = False) -> IntegerCodes:
    draw = torch.Generator().manual_seed(seed)
    top = 1 << bits
    return IntegerCodes(
        torch.randint(0, top, (rows, DEPTH), generator=draw).byte(),
        torch.rand(rows, DEPTH // 32, generator=draw) / top,
        torch.randint(0, top, (rows, DEPTH // 32), generator=draw).byte() if zeros else None,
        bits,
        32,
    )


def float8(rows: int, high: int, *, seed: int) -> Float8Codes:
    scales = randn(-(-rows // high), DEPTH // 32, seed=seed).abs()
    return Float8Codes(randn(rows, DEPTH, seed=seed).to(torch.float8_e4m3fn), scales, (high, 32))


def plain(piece: Codes) -> torch.Tensor:
    rows = piece.codes.shape[0]
    if isinstance(piece, Float8Codes):
        factors = piece.scales.repeat_interleave(piece.block[0], 0)[:rows]
        return piece.codes.float() * factors.repeat_interleave(piece.block[1], 1)
    middle = torch.tensor(1 << (piece.bits - 1))
    zeros = middle if piece.zeros is None else piece.zeros.repeat_interleave(piece.group, 1)
    wide = piece.codes.float() - zeros.float()
    return wide * piece.scales.repeat_interleave(piece.group, 1)


def check(got: Linear, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    x, other = randn(5, DEPTH, seed=9), randn(5, len(weight), seed=8)
    product = F.linear(x, weight, bias)
    assert (got.columns, got.depth) == tuple(weight.shape)
    for found, expected in (
        (got(x), product),
        (got(x, activation="silu"), F.silu(product)),
        (got(x, times=other), product * other),
        (got(x, plus=other), product + other),
        (got.gated(got, x), F.silu(product) * product),
        (got(x, deterministic=True), product),
    ):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


PARTS = [Part(name, (ROWS, DEPTH)) for name in "qkv"]


@pytest.mark.parametrize("compiled", [False, True])
def test_parts_of_one_kind_are_one_weight(compiled: bool) -> None:
    """Pieces with zero points and without, and blocks of other heights."""
    coded = {"q": [integers(ROWS, seed=1)], "k": [integers(ROWS, seed=2, zeros=True)]}
    coded["v"] = [integers(24, seed=3), integers(16, seed=4)]
    pieces = [piece for each in coded.values() for piece in each]
    got = load(Source(compiled, **coded), PARTS)
    assert not isinstance(got, Joined)
    check(got, torch.cat([plain(piece) for piece in pieces]))
    blocks = {"q": [float8(ROWS, 8, seed=1)], "k": [float8(ROWS, 16, seed=2)]}
    got = load(Source(compiled, **blocks), PARTS[:2])
    assert not isinstance(got, Joined)
    check(got, torch.cat([plain(each[0]) for each in blocks.values()]))


@pytest.mark.parametrize("compiled", [False, True])
def test_parts_of_several_formats_stay_beside_each_other(compiled: bool) -> None:
    dense, four, eight = randn(ROWS, DEPTH) / 8, integers(ROWS, seed=1), float8(ROWS, 8, seed=2)
    bias = randn(3 * ROWS, seed=3)
    source = Source(
        compiled, q=[four], k=dense, v=[eight], **dict(zip("abc", bias.view(3, -1), strict=True))
    )
    weight = torch.cat([plain(four), dense, plain(eight)])
    got = load(source, PARTS)
    assert isinstance(got, Joined) and len(got.parts) == 3
    assert got.nbytes == sum(part.nbytes for part in got.parts)
    assert got.record() is None
    check(got, weight)
    biased = load(source, PARTS, [Part(name, (ROWS,)) for name in "abc"])
    check(biased, weight, bias)


def test_a_row_alone_has_the_bits_it_has_among_many() -> None:
    source = Source(
        True, q=[integers(ROWS, seed=1)], k=randn(ROWS, DEPTH), v=[float8(ROWS, 8, seed=2)]
    )
    got, x = load(source, PARTS), randn(64, DEPTH, seed=4)
    whole = got(x, deterministic=True)
    for row in (0, 17, 63):
        assert torch.equal(got(x[row : row + 1], deterministic=True), whole[row : row + 1])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_column_alone_has_the_bits_it_has_among_many(dynamic: bool, rows: int) -> None:
    """Among more than are computed before any of them is used, with factors and biases."""
    columns, step = 2150, 50
    bias, x = randn(columns, seed=1), randn(rows, DEPTH, seed=2)
    codes = quantise(randn(columns, DEPTH), 4, 32)
    factors = codes.factors
    assert factors is not None

    def product(first: int, last: int) -> torch.Tensor:
        own = slice(first, last)
        piece = IntegerCodes(codes.codes[own], codes.scales[own], None, 4, 32, factors[own])
        return PackedCodes.of([piece], last - first, DEPTH, bias[own], dynamic=dynamic)(x)

    alone = [product(first, first + step) for first in range(0, columns, step)]
    assert torch.equal(product(0, columns), torch.cat(alone, 1))
