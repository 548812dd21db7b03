"""Compare products with quantised weights with bfloat16 ones and with the machine's limits.

    python benchmarks/kernels_cpu_codes.py [--threads 2] [--rounds 9] [--shapes 2048x6144,...]
        [--rows 1,8,512,4096] [--kinds "bfloat16,int4 dynamic,..."] [--isa avx2]

Few rows read weights that no cache holds, in large pages as a server's: distinct ones are cycled
until 192 MB have been touched, and `share` is of the rate at which as many bytes are read plainly
in the same rounds. With more rows `share` is of the multiply-adds of the processor: of bytes summed
by fours if the arithmetic is dynamic, else of float32 (which pairs of bfloat16 may exceed).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common.kernels_before import timed
from common.limits import Limits
from common.machine import add_isa_argument, describe, run_as

from vlm_serve.kernels.linear import Linear, dense
from vlm_serve.kernels.linear.codes import IQ4_VALUES, Float8Codes, IntegerCodes
from vlm_serve.kernels.linear.packed_codes import PackedCodes
from vlm_serve.kernels.linear.quantising import GROUPS, SCALES
from vlm_serve.system.host_memory import retain_freed_memory

TOUCHED = 192 << 20
FEW = 8


@dataclass(frozen=True)
class Kind:
    """A format and its arithmetic: bits 16 are bfloat16, and 0 e4m3 in blocks of 128. `wide` scales
    are bfloat16, where quantising makes smaller ones; `float4` ones are those of e2m1 codes. With a
    `table` the codes are llama.cpp's IQ4."""

    name: str
    bits: int
    dynamic: bool = False
    wide: bool = False
    float4: torch.dtype | None = None
    table: bool = False

    def make(self, columns: int, depth: int) -> Linear:
        if self.bits == 16:
            return dense(torch.randn(columns, depth).bfloat16(), compiled=True)
        if self.float4:
            group = 16 if self.float4 == torch.float8_e4m3fn else 32
            codes = torch.randint(16, (columns, depth), dtype=torch.uint8)
            ones, factors = torch.ones(columns, depth // group), torch.full((columns,), 2.0**-6)
            numbers = IntegerCodes(codes, ones.to(self.float4), None, 4, group, factors, True)
            return PackedCodes.of([numbers], columns, depth, dynamic=self.dynamic)
        if self.table:
            codes = torch.randint(16, (columns, depth), dtype=torch.uint8)
            halves = torch.full((columns, depth // 32), 0.01, dtype=torch.float16)
            places = IntegerCodes(codes, halves, None, 4, 32, table=IQ4_VALUES)
            return PackedCodes.of([places], columns, depth, dynamic=self.dynamic)
        if self.bits:
            group = GROUPS[self.bits][0]
            codes = torch.randint(1 << self.bits, (columns, depth), dtype=torch.uint8)
            kept = torch.bfloat16 if self.wide else SCALES[self.bits]
            own = torch.full((columns, depth // group), 100).to(kept)
            factors = torch.full((columns,), 2.0**-20) if kept == torch.int8 else None
            integers = IntegerCodes(codes, own, None, self.bits, group, factors)
            return PackedCodes.of([integers], columns, depth, dynamic=self.dynamic)
        plain = torch.randn(columns, depth)
        scales = torch.ones(-(-columns // 128), depth // 128)
        piece = Float8Codes(plain.to(torch.float8_e4m3fn), scales.bfloat16(), (128, 128))
        return PackedCodes.of([piece], columns, depth)


KINDS = (
    Kind("bfloat16", 16),
    Kind("int8 exact", 8),
    Kind("int8 dynamic", 8, dynamic=True),
    Kind("int6 exact", 6),
    Kind("int6 dynamic", 6, dynamic=True),
    Kind("int4 exact", 4),
    Kind("int4 dynamic", 4, dynamic=True),
    Kind("int4 exact wide", 4, wide=True),
    Kind("int4 dynamic wide", 4, dynamic=True, wide=True),
    Kind("nvfp4 exact", 4, float4=torch.float8_e4m3fn),
    Kind("nvfp4 dynamic", 4, dynamic=True, float4=torch.float8_e4m3fn),
    Kind("mxfp4 dynamic", 4, dynamic=True, float4=torch.float8_e8m0fnu),
    Kind("iq4 exact", 4, table=True),
    Kind("iq4 dynamic", 4, dynamic=True, table=True),
    Kind("fp8 exact", 0),
)


def case(
    kinds: list[Kind], columns: int, depth: int, rows: int, rounds: int, limits: Limits
) -> None:
    """Prints the rows of one shape."""
    x = torch.randn(rows, depth).bfloat16()
    runs: dict[str, Callable[[], float]] = {}
    sizes: dict[str, int] = {}
    for kind in kinds:
        first = kind.make(columns, depth)
        count = -(-TOUCHED // first.nbytes) if rows <= FEW else 1
        weights = [first, *(kind.make(columns, depth) for _ in range(count - 1))]
        runs[kind.name] = per_call(weights, x)
        sizes[kind.name] = first.nbytes
    work = {kind.name: 2.0 * rows * columns * depth for kind in kinds}
    best = {kind.name: limits.byte_dots if kind.dynamic else limits.multiply_add for kind in kinds}
    if rows <= FEW:
        work = {name: float(size) for name, size in sizes.items()}
        best = {name: lambda: float(limits.read(TOUCHED)) for name in sizes}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    shares: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(-1, rounds):
        names = list(runs)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken, rate = runs[name](), _rate(best[name])
            if number >= 0:
                seconds[name].append(taken)
                shares[name].append(work[name] / taken / rate if rate else float("nan"))
    plain = kinds[0].name
    for name, own in seconds.items():
        ratio = statistics.median(
            other / mine for other, mine in zip(seconds[plain], own, strict=True)
        )
        typical, share = statistics.median(own), statistics.median(shares[name])
        print(
            f"| {depth} x {columns}, {rows} | {name} | {1e3 * typical:.3f} "
            f"| {sizes[name] / typical / 1e9:.1f} | {2e-9 * rows * columns * depth / typical:.0f} "
            f"| {ratio:.2f} | {share:.2f} |",
            flush=True,
        )


def _rate(limit: Callable[[], float]) -> float:
    """Bytes or operations of one second."""
    done: list[float] = []
    taken = timed(lambda: done.append(limit()))
    return done[0] / taken


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
    parser.add_argument("--rows", default="1,8,512,4096")
    parser.add_argument("--kinds", default=",".join(kind.name for kind in KINDS))
    add_isa_argument(parser)
    given = parser.parse_args()
    run_as(given.isa)
    wanted = given.kinds.split(",")
    kinds = [kind for kind in KINDS if kind.name in wanted]
    if len(kinds) != len(wanted):
        parser.error(f"--kinds must be among {', '.join(kind.name for kind in KINDS)}")
    retain_freed_memory()
    limits = Limits(given.threads, TOUCHED)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(describe(given.threads))
    print(f"| K x N, rows | weights | ms | GB/s | Gop/s | {kinds[0].name} / it | share |")
    print("|---" * 7 + "|")
    for shape in given.shapes.split(","):
        depth, columns = map(int, shape.split("x"))
        for rows in map(int, given.rows.split(",")):
            case(kinds, columns, depth, rows, given.rounds, limits)


if __name__ == "__main__":
    main()
