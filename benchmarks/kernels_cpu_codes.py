"""Products with quantised weights beside those with bfloat16 ones; one run, paired.

    python benchmarks/kernels_cpu_codes.py [--threads 2] [--rounds 9] [--shapes 2048x6144,...]
        [--rows 1,8,512] [--isa avx2]

Few rows read weights that no cache holds: distinct ones are cycled until 64 MB have been touched.
`share` is what a format reaches of the speed that its bytes (codes and scales) would give at the
rate at which the bfloat16 weights are read in the same rounds; due at one row: 0.88 for int8, 0.8
for int4.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernels_before import timed
from machine import add_isa_argument, describe, run_as

from vlm_serve.kernels.linear import Linear, dense
from vlm_serve.kernels.linear.codes import Float8Codes, IntegerCodes
from vlm_serve.kernels.linear.float8 import PackedFloat8
from vlm_serve.kernels.linear.integers import PackedIntegers
from vlm_serve.kernels.linear.quantising import GROUPS

TOUCHED = 64 << 20
FEW = 8


@dataclass(frozen=True)
class Kind:
    """A format and its arithmetic: bits 16 are bfloat16, and 0 e4m3 in blocks of 128."""

    name: str
    bits: int
    dynamic: bool = False

    def make(self, columns: int, depth: int) -> Linear:
        if self.bits == 16:
            return dense(torch.randn(columns, depth).bfloat16(), compiled=True)
        if self.bits:
            group = GROUPS[self.bits][0]
            codes = torch.randint(1 << self.bits, (columns, depth), dtype=torch.uint8)
            own = torch.full((columns, depth // group), 0.01, dtype=torch.bfloat16)
            integers = IntegerCodes(codes, own, None, self.bits, group)
            return PackedIntegers.of([integers], columns, depth, dynamic=self.dynamic)
        plain = torch.randn(columns, depth)
        scales = torch.ones(-(-columns // 128), depth // 128)
        piece = Float8Codes(plain.to(torch.float8_e4m3fn), scales.bfloat16(), (128, 128))
        return PackedFloat8.of([piece], columns, depth)


KINDS = (
    Kind("bfloat16", 16),
    Kind("int8 exact", 8),
    Kind("int8 dynamic", 8, dynamic=True),
    Kind("int4 exact", 4),
    Kind("int4 dynamic", 4, dynamic=True),
    Kind("fp8 exact", 0),
)


def case(columns: int, depth: int, rows: int, rounds: int) -> None:
    """Prints the rows of one shape."""
    x = torch.randn(rows, depth).bfloat16()
    runs: dict[str, Callable[[], float]] = {}
    sizes: dict[str, int] = {}
    for kind in KINDS:
        first = kind.make(columns, depth)
        count = -(-TOUCHED // first.nbytes) if rows <= FEW else 1
        weights = [first, *(kind.make(columns, depth) for _ in range(min(count, 24) - 1))]
        runs[kind.name] = per_call(weights, x)
        sizes[kind.name] = first.nbytes
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1, rounds):
        names = list(runs)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = runs[name]()
            if number >= 0:
                seconds[name].append(taken)
    plain = KINDS[0].name
    for name, own in seconds.items():
        ratios = [other / mine for other, mine in zip(seconds[plain], own, strict=True)]
        ratio, typical = statistics.median(ratios), statistics.median(own)
        share = f"{ratio * sizes[name] / sizes[plain]:.2f}" if rows <= FEW else ""
        speed = sizes[name] / typical / 1e9
        operations = 2 * rows * columns * depth / typical / 1e9
        print(
            f"| {depth} x {columns}, {rows} | {name} | {1e3 * typical:.3f} | {speed:.1f} "
            f"| {operations:.0f} | {ratio:.2f} | {share} |",
            flush=True,
        )


def per_call(weights: list[Linear], x: torch.Tensor) -> Callable[[], float]:
    """Seconds of one product, over all weights."""

    def run() -> None:
        for weight in weights:
            weight(x)

    return lambda: timed(run) / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", default="2048x6144,6144x2048,1024x3072")
    parser.add_argument("--rows", default="1,8,512")
    add_isa_argument(parser)
    given = parser.parse_args()
    run_as(given.isa)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(describe(given.threads))
    print("| K x N, rows | weights | ms | GB/s | Gop/s | bfloat16 / ours | share |")
    print("|---" * 7 + "|")
    for shape in given.shapes.split(","):
        depth, columns = map(int, shape.split("x"))
        for rows in map(int, given.rows.split(",")):
            case(columns, depth, rows, given.rounds)


if __name__ == "__main__":
    main()
