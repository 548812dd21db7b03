"""Projections: values against the plain product, a row's bits in any company, the layout in memory,
and loading from parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from recorded_ops import RecordedOps

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear import Linear, Part, Shard, dense, load
from vlm_serve.kernels.linear.dense import PackedDense
from vlm_serve.kernels.linear.few_rows import MOST_ROWS
from vlm_serve.kernels.linear.torch_dense import TorchDense

SHAPES = [(1, 64), (37, 65), (200, 64), (48, 300), (272, 2304), (2150, 64)]
"""The last one has more columns than compiled code computes of a row before any of them is used."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Types of weight and activations that compiled code multiplies.
COMPILED = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]
TORCH = [(kind, kind) for kind in FLOATS]
CASES = [(False, *types) for types in TORCH] + [(True, *types) for types in COMPILED]

pytestmark = pytest.mark.usefixtures("compiler")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("compiled", "weights", "activations"), CASES)
def test_equals_the_plain_product(
    shape: tuple[int, int], compiled: bool, weights: torch.dtype, activations: torch.dtype
) -> None:
    weight, x = randn(*shape, dtype=weights), randn(220, shape[1], seed=1, dtype=activations)
    bias = randn(shape[0], seed=2, dtype=weights)
    expected = x.double() @ weight.double().T
    single = activations == torch.float32
    atol, rtol = (12e-6 * shape[1] ** 0.5, 0.0) if single else (1e-2, 2**-8)
    bare, biased = dense(weight, compiled=compiled), dense(weight, bias, compiled=compiled)
    for rows in (0, 1, 3, 40, 220):
        plain = bare(x[:rows])
        assert plain.dtype == activations and plain.shape == (rows, shape[0])
        torch.testing.assert_close(plain.double(), expected[:rows], atol=atol, rtol=rtol)
        torch.testing.assert_close(
            biased(x[:rows]).double(), expected[:rows] + bias.double(), atol=atol, rtol=rtol
        )


@pytest.mark.parametrize(("compiled", "weights", "activations"), CASES[:2] + CASES[3:])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_what_follows_the_product(
    compiled: bool, weights: torch.dtype, activations: torch.dtype, rows: int
) -> None:
    plain = (randn(49, 64) / 8).to(weights)
    x, other = (randn(rows, n, seed=n, dtype=activations) for n in (64, 49))
    bias = randn(49, seed=3, dtype=weights)
    projection = dense(plain, bias, compiled=compiled)
    product = x.double() @ plain.double().T + bias.double()
    tolerance = 1e-5 if activations == torch.float32 else 0.04
    cases = (
        (projection(x, activation="silu"), F.silu(product)),
        (projection(x, activation="gelu"), F.gelu(product)),
        (projection(x, activation="gelu_tanh"), F.gelu(product, approximate="tanh")),
        (projection(x, activation="relu2"), F.relu(product).square()),
        (projection(x, times=other), product * other.double()),
        (projection(x, plus=other), product + other.double()),
    )
    for got, expected in cases:
        assert got.dtype == activations
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    with pytest.raises(KernelArgumentError, match="at most one"):
        projection(x, activation="silu", plus=other)
    with pytest.raises(KernelArgumentError, match="expected .T, 64"):
        projection(x[:, :63])


@pytest.mark.parametrize(("compiled", "weights", "activations"), CASES[:2] + CASES[3:])
@pytest.mark.parametrize("columns", [96, 25])
def test_gated_products(
    compiled: bool, weights: torch.dtype, activations: torch.dtype, columns: int
) -> None:
    gate, up = (randn(columns, 64, seed=n, dtype=weights) / 8 for n in (0, 1))
    x = randn(33, 64, seed=2, dtype=activations)
    got = dense(gate, compiled=compiled).gated(dense(up, compiled=compiled), x)
    wide = x.double()
    expected = F.silu(wide @ gate.double().T) * (wide @ up.double().T)
    tolerance = 1e-5 if activations == torch.float32 else 0.04
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("compiled", [False, True])
def test_strided_rows_are_read_in_place(compiled: bool) -> None:
    weight, wide = randn(24, 32), randn(20, 96, seed=1)
    x = wide[:, 32:64]
    got = dense(weight, compiled=compiled)(x, plus=wide[:, :24])
    torch.testing.assert_close(got, x @ weight.T + wide[:, :24], atol=1e-5, rtol=0)


def products(projection: Linear, x: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    return [
        projection(x, deterministic=True),
        projection(x, activation="silu", deterministic=True),
        projection(x, activation="gelu", deterministic=True),
        projection(x, activation="gelu_tanh", deterministic=True),
        projection(x, times=other, deterministic=True),
        projection(x, plus=other, deterministic=True),
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("weights", "activations"), COMPILED)
def test_a_row_alone_has_the_bits_it_has_among_many(
    shape: tuple[int, int], weights: torch.dtype, activations: torch.dtype
) -> None:
    projection = dense(randn(*shape, dtype=weights), compiled=True)
    x, other = (randn(430, n, seed=n, dtype=activations) for n in reversed(shape))
    whole = products(projection, x, other)
    threads = torch.get_num_threads()
    for rows in (1, 2, 3, 5, 12, 13, 16, 17, 64, 193, 429):
        for start in (0, 430 - rows):
            part = slice(start, start + rows)
            torch.set_num_threads(1 + rows % 3)
            own = products(projection, x[part], other[part])
            torch.set_num_threads(threads)
            for some, all_rows in zip(own, whole, strict=True):
                assert torch.equal(some, all_rows[part]), (rows, start)


def _torch_keeps_bits(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN multiplies 16 rows as it does 300; some of its code for
    processors without AVX-512 does not."""
    projection, x = dense(randn(272, 2304, dtype=dtype)), randn(300, 2304, seed=1, dtype=dtype)
    return torch.equal(projection(x)[:16], projection(x[:16]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_deterministic_rows_of_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    if not _torch_keeps_bits(dtype):
        pytest.skip("torch's products on this processor depend on the number of rows")
    projection = dense(randn(*shape, dtype=dtype))
    x, other = (randn(300, n, seed=n, dtype=dtype) for n in reversed(shape))
    whole = products(projection, x, other)
    for rows in (1, 2, 5, 15, 16, 17, 64, 299):
        for start in (0, 300 - rows):
            part = slice(start, start + rows)
            own = products(projection, x[part], other[part])
            for some, all_rows in zip(own, whole, strict=True):
                assert torch.equal(some, all_rows[part]), (rows, start)


@pytest.mark.parametrize("shape", [*SHAPES, (64, 33), (130, 64)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_layout(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every element, wherever the pieces that it came in were cut."""
    weight = randn(*shape, dtype=dtype)
    for cuts in ((), (5,), (1, 33), (40, 41, 100)):
        pieces = torch.tensor_split(weight, cuts)
        packed = PackedDense.of(pieces, *shape, dtype)
        assert torch.equal(packed.plain(), weight)
        panels = packed._packed.view(-(-shape[0] // 32), -1)
        pair = 2 if dtype == torch.bfloat16 else 1
        first = panels[0].view(-1, 32, pair)
        assert torch.equal(first[0, 0], weight[0, :pair])
        # What a panel or a pair lacks is zero.
        assert int(packed._packed.count_nonzero()) == int(weight.count_nonzero())
        assert packed.nbytes == packed._packed.nbytes


class Tensors:
    """A checkpoint in memory."""

    def __init__(self, dtype: torch.dtype, compiled: bool, **tensors: torch.Tensor) -> None:
        self.dtype, self.device, self.compiled = dtype, torch.device("cpu"), compiled
        self._tensors, self.dynamic = tensors, False

    def mapped(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        assert self._tensors[name].shape == tuple(shape)
        return self._tensors[name]

    def codes(self, part: Part, shard: Shard | None) -> None:
        return None


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_parts(compiled: bool, dtype: torch.dtype) -> None:
    q, k, experts = randn(24, 16), randn(8, 16, seed=1), randn(3, 10, 16, seed=2)
    bias = randn(24, seed=3)
    source = Tensors(dtype, compiled, q=q, k=k, experts=experts, bias=bias)
    heads = (range(4, 8), range(12, 16))
    parts = [
        Part("q", (24, 16), heads),
        Part("k", (8, 16)),
        Part("experts", (3, 10, 16), (range(2, 4),), index=1),
    ]
    got, x = load(source, parts), randn(5, 16, seed=4, dtype=dtype)
    rows = torch.cat([q[4:8], q[12:16], k, experts[1, 2:4]]).to(dtype)
    assert (got.columns, got.depth) == (18, 16)
    assert torch.equal(got(x), dense(rows, compiled=compiled)(x))
    biased = load(source, [Part("q", (24, 16))], [Part("bias", (24,))])
    expected = dense(q.to(dtype), bias.to(dtype), compiled=compiled)(x)
    assert torch.equal(biased(x), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_loading_what_a_checkpoint_keeps_transposed(compiled: bool) -> None:
    plain, experts = randn(16, 24), randn(3, 16, 10, seed=1)
    source = Tensors(torch.float32, compiled, plain=plain, experts=experts)
    whole = Part("plain", (16, 24), transposed=True)
    parts = [whole, Part("experts", (3, 16, 10), (range(2, 4),), index=1, transposed=True)]
    x, rows = randn(5, 16, seed=2), torch.cat([plain.T, experts[1].T[2:4]])
    got = load(source, parts)
    assert (got.columns, got.depth) == (26, 16)
    assert torch.equal(got(x), dense(rows, compiled=compiled)(x))
    half = load(source, [whole], shard=Shard(1, 2, 1))
    expected = dense(plain.T[:, 8:], compiled=compiled)(x[:, 8:])
    assert half.depth == 8 and torch.equal(half(x[:, 8:]), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_loading_shards(compiled: bool) -> None:
    q, k = randn(24, 16), randn(8, 16, seed=1)
    source = Tensors(torch.float32, compiled, q=q, k=k)
    parts = [Part("q", (24, 16), (range(0, 6), range(12, 18))), Part("k", (8, 16))]
    x = randn(5, 16, seed=2)
    for rank in (0, 1):
        rows = load(source, parts, shard=Shard(rank, 2, 0))
        own = torch.cat([q[12 * rank : 12 * rank + 6], k[4 * rank : 4 * rank + 4]])
        assert torch.equal(rows(x), dense(own, compiled=compiled)(x))
        depth = load(source, parts[1:], shard=Shard(rank, 2, 1))
        half = slice(8 * rank, 8 * rank + 8)
        expected = dense(k[:, half], compiled=compiled)(x[:, half])
        assert depth.depth == 8 and torch.equal(depth(x[:, half]), expected)
    with pytest.raises(KernelArgumentError, match="8 do not split into 3"):
        load(source, parts[1:], shard=Shard(0, 3, 0))


def test_types_that_do_not_meet() -> None:
    projection = dense(randn(8, 16), compiled=True)
    with pytest.raises(KernelArgumentError, match=r"bfloat16 beside a weight in torch.float32"):
        projection(randn(2, 16, dtype=torch.bfloat16))
    with pytest.raises(KernelArgumentError, match=r"float16 beside"):
        projection(randn(2, 16, dtype=torch.float16))


def launched(overwrite: bool) -> tuple[bool, list[str]]:
    """Whether a product takes the place of the tensor that it is added to, and its operations
    besides views."""
    rows = MOST_ROWS + 1
    x, plus = torch.empty(rows, 8, device="meta"), torch.empty(rows, 6, device="meta")
    linear = TorchDense(torch.empty(6, 8, device="meta"), None)
    with RecordedOps() as recorded:
        out = linear(x, plus=plus, overwrite=overwrite)
    return out is plus, [name for name in recorded.names if name not in ("t", "permute")]


def test_a_gpu_adds_a_product_to_the_residual_in_place() -> None:
    """Out of place, torch's product copies the residual first."""
    assert launched(overwrite=True) == (True, ["addmm_"])
    assert launched(overwrite=False) == (False, ["addmm"])


def test_a_residual_that_may_be_overwritten_gives_the_same_bits() -> None:
    x, weight, plus = randn(5, 8), randn(6, 8), randn(5, 6)
    expected = torch.addmm(plus, x, weight.T)
    assert torch.equal(plus.clone().addmm_(x, weight.T), expected)
    for compiled in (False, True):
        projection = dense(weight, compiled=compiled)
        out = projection(x, plus=plus.clone(), overwrite=True)
        assert torch.equal(out, projection(x, plus=plus))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_s_part_of_a_row_does_not_depend_on_the_rows_beside_it(
    dtype: torch.dtype, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    dense = TorchDense(weight, torch.randn(48, generator=generator).to(dtype) if bias else None)
    x = torch.randn(300, 64, generator=generator).to(dtype)
    whole = dense.partial(x, deterministic=True)
    for rows in (1, 7, 16, 33):
        assert torch.equal(dense.partial(x[:rows], deterministic=True), whole[:rows])
