"""Measure the error that quantising brings to every projection of a checkpoint.

The errors of its weight, and of its products with quantised activations, are relative to the plain
ones.

    python benchmarks/quantised_error.py demo [--quantization int4]
    python benchmarks/quantised_error.py --random

Rows are random, normally distributed, each with a few values twenty times as large as the rest, as
residuals have them. `weight` is the norm of the difference of the weights over that of the plain
one; `exact` and `dynamic` are the same of products. With `--random` weights are drawn, and their
error in 4 bits is set beside that with scales in bfloat16 instead of one byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from unittest.mock import patch

import torch

from vlm_serve.engine.start.build import find_checkpoint
from vlm_serve.kernels.linear import Linear, Part, Shard, dense, quantising
from vlm_serve.kernels.linear.codes import IntegerCodes, scale_values
from vlm_serve.kernels.linear.packed_codes import PackedCodes
from vlm_serve.kernels.linear.quantising import quantise
from vlm_serve.models import read_spec
from vlm_serve.models.model import Decoder
from vlm_serve.models.quantization.base import loading_format
from vlm_serve.models.weights import Weights

ROWS, LARGE = 64, 4


class Watched(Weights):
    """Notes which parts a model asks for."""

    parts: list[Part]

    def linear(
        self, *parts: Part, bias: list[Part] | None = None, shard: Shard | None = None
    ) -> Linear:
        self.parts += parts
        return super().linear(*parts, bias=bias, shard=shard)


def parts_of(model: str) -> tuple[Watched, list[Part]]:
    """A checkpoint and the parts of its language model's projections."""
    path = find_checkpoint(model)
    spec = read_spec(path)
    weights = Watched(path, torch.float32, torch.device("cpu"))
    weights.parts = []
    head = None if spec.tied_embeddings else weights.head_name()
    Decoder(spec, weights, weights.text_prefix, head)
    return weights, weights.parts


def rows_of(depth: int) -> torch.Tensor:
    x = torch.randn(ROWS, depth)
    x[:, torch.randperm(depth)[:LARGE]] *= 20
    return x


def errors(plain: torch.Tensor, bits: int, group: int) -> Iterator[float]:
    """Of the weight, of exact and of dynamic products."""
    codes = quantise(plain, bits, group)
    yield relative(value(codes), plain)
    x = rows_of(plain.shape[1])
    expected = dense(plain, compiled=True)(x)
    for dynamic in (False, True):
        packed = PackedCodes.of([codes], *plain.shape, dynamic=dynamic)
        yield relative(packed(x), expected)


def value(codes: IntegerCodes) -> torch.Tensor:
    steps = codes.codes.view(len(codes.codes), -1, codes.group).float() - (1 << (codes.bits - 1))
    return (steps * scale_values(codes.scales, codes.factors)[..., None]).flatten(1)


def random_weights() -> Iterator[tuple[str, torch.Tensor]]:
    shape = (512, 2048)
    yield "normal", torch.randn(shape)
    for freedom in (5.0, 3.0, 2.0):
        yield f"Student's t, {freedom:.0f}", torch.distributions.StudentT(freedom).sample(shape)
    apart = torch.randn(512, 64).repeat_interleave(32, 1)
    yield "normal, groups apart", torch.randn(shape) * torch.exp(1.5 * apart)


def random_errors() -> None:
    print("| weight | one byte | bfloat16 | squares, one byte / bfloat16 |\n|---|---|---|---|")
    for name, plain in random_weights():
        byte = relative(value(quantise(plain, 4, 32)), plain)
        with patch.dict(quantising.SCALES, {4: torch.bfloat16}):
            wide = relative(value(quantise(plain, 4, 32)), plain)
        print(f"| {name} | {byte:.5f} | {wide:.5f} | {(byte / wide) ** 2:.4f} |")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("model", nargs="?")
    what.add_argument("--random", action="store_true")
    parser.add_argument("--quantization", choices=("int8", "int6", "int4"), default="int4")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.random:
        return random_errors()
    wanted = int(given.quantization.removeprefix("int"))
    weights, parts = parts_of(given.model)
    print("| weight | format | weight | exact | dynamic |\n|---|---|---|---|---|")
    for part in parts:
        form = loading_format(wanted, part, part.sizes[1])
        name = part.name if part.index is None else f"{part.name}[{part.index}]"
        if form is None:
            print(f"| {name} | as it is | | | |")
            continue
        plain = torch.cat(list(part.pieces(weights, None)))
        cells = " | ".join(f"{each:.4f}" for each in errors(plain, form.bits, form.group))
        print(f"| {name} | {form.label}, groups of {form.group} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
