"""Compare products alone with oneDNN's and with the machine's limits; see `kernels_cpu.py`.

Few rows read weights that no cache holds: distinct ones are cycled until 256 MB have been touched.
They are measured twice: called one by one from Python, as theirs are, and in a step of the engine
(`kernels_cpu_in_step.py`), which is what is held against the limit. Plain reads and multiply-adds
come right before and right behind each of those: a machine that others share changes its pace
within a second. All types of a shape are measured in the same rounds.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from common.kernels_before import SETTLE_SECONDS, Before, timed
from common.limits import Limits
from common.machine import emulated
from vlm_serve.kernels import linear as kernels

AGO = hasattr(kernels, "pack")
"""Whether this process runs a commit before `Linear`, whose products read other types."""
TYPES = (torch.float32, torch.bfloat16) if AGO else (torch.float32, torch.bfloat16, torch.float16)
"""Of the weights that our product reads itself."""


def product(weight: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """The product with a weight as our kernels do it: all that knows their interface is here."""
    if AGO:
        packed = kernels.pack(weight)
        return lambda x: kernels.linear(x, packed)
    return kernels.dense(weight, compiled=True)


def activations(weight: torch.dtype) -> torch.dtype:
    """The type of rows that our product takes beside weights of a type where it is fastest."""
    in_pairs = weight == torch.bfloat16 and (AGO or weight in set(native_types()))
    return torch.bfloat16 if in_pairs else torch.float32


SHAPES = ((512, 1536), (1536, 512), (1024, 3072), (2560, 9216), (2048, 6144))
"""K and N."""
ROWS = (4096, 512, 64, 8, 1)
FEW = 8
"""Up to this many rows a product is bound by reading its weight."""
TOUCHED = 256 << 20
SAMPLE_SECONDS, WAKE_SECONDS = 0.01, 0.1
LONG_SECONDS, LONG_ROUNDS = 4.0, 3
"""Of rounds as long as that there are only so many."""

ONE_ROW, ONE_ROW_GOAL, EIGHT_ROWS = 0.70, 0.85, 0.75
MANY_ROWS = {"avx2": 1.0, "avx512": 0.9}
PEAK, READ = "peak", "read"
OURS, IN_STEP = "ours", "in a step"


@dataclass
class Product:
    """One shape with one number of rows.

    Attributes:
        rows, k, n: `[rows, k] @ [n, k].T`.
    """

    rows: int
    k: int
    n: int

    def weights(self, dtype: torch.dtype) -> list[torch.Tensor]:
        one = torch.randn(self.n, self.k).to(dtype)
        count = math.ceil(TOUCHED / one.nbytes) if self.rows <= FEW else 1
        return [one, *(one.clone() for _ in range(count - 1))]

    def x(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(self.rows, self.k).to(dtype)

    def ours(self) -> dict[str, Callable[[], object]]:
        """By type, what runs our product with every weight."""
        return {name: over(weights, x) for name, weights, x in self._ours()}

    def sides(self) -> dict[tuple[str, str], Callable[[], object]]:
        """The same by side and type, and beside it that product in steps."""
        # Commits that a child measures, which asks for `ours` alone, need not have steps.
        from common.kernels_cpu_in_step import in_a_step

        sides: dict[tuple[str, str], Callable[[], object]] = {}
        for name, weights, x in self._ours():
            sides[OURS, name] = over(weights, x)
            if self.rows <= FEW:
                sides[IN_STEP, name] = in_a_step(weights, x)
        return sides

    def _ours(self) -> Iterator[tuple[str, list[Any], torch.Tensor]]:
        """Types, weights of them as our kernels have them, and rows."""
        for dtype in TYPES:
            packed = [product(weight) for weight in self.weights(dtype)]
            yield short(dtype), packed, self.x(activations(dtype))

    def theirs(self) -> dict[str, dict[str, Callable[[], object]]]:
        """By type, torch's product and oneDNN's with a weight in its own layout."""
        sides: dict[str, dict[str, Callable[[], object]]] = {}
        for dtype in native_types():
            weights, x = self.weights(dtype), self.x(dtype)
            sides[short(dtype)] = {
                "torch": over([torch_product(w) for w in weights], x),
                "oneDNN": over([onednn_product(w, self.rows) for w in weights], x),
            }
        return sides

    def calls(self, dtype: str) -> int:
        """Products in one run."""
        return len(range(0, TOUCHED, self._bytes(dtype))) if self.rows <= FEW else 1

    def flops(self, dtype: str) -> float:
        return 2.0 * self.rows * self.k * self.n * self.calls(dtype)

    def read(self, dtype: str) -> float:
        """Bytes of weights in one run."""
        return float(self._bytes(dtype) * self.calls(dtype))

    def _bytes(self, dtype: str) -> int:
        itemsize: int = getattr(torch, dtype).itemsize
        return self.k * self.n * itemsize


def torch_product(weight: torch.Tensor) -> Callable[[torch.Tensor], object]:
    return lambda x: F.linear(x, weight)


def onednn_product(weight: torch.Tensor, rows: int) -> Callable[[torch.Tensor], object]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    run = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: run(x, packed, None, "none", [], "")


def over(products: list[Callable[[torch.Tensor], object]], x: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        for one in products:
            one(x)

    return run


def native_types() -> Iterator[torch.dtype]:
    """Those that oneDNN has products for on this processor; others it would convert or refuse."""
    yield torch.float32
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield torch.bfloat16
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        yield torch.float16


def products() -> Iterator[Product]:
    for (k, n), rows in itertools.product(SHAPES, ROWS):
        yield Product(rows, k, n)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Seconds = Mapping[tuple[str, str], list[float]]
"""By side and type, of every round. PEAK and READ are given per operation and per byte: for few
rows by the type of the product that they have been beside, else PEAK alone, without a type."""


def measure(case: Product, limits: Limits, rounds: int, before: Before | None) -> Seconds:
    """Runs everything in turns, in an order that turns each round."""
    sides = case.sides()
    for dtype, theirs in case.theirs().items():
        sides |= {(name, dtype): run for name, run in theirs.items()}
    runs: dict[tuple[str, str], Callable[[], float]] = {
        key: repeated(function) for key, function in sides.items()
    }
    if case.rows > FEW:
        runs[PEAK, ""] = lambda: per_unit(limits.multiply_add)
    pairs = {} if before is None else {each: pair(before, each) for each in before.next()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    in_steps = [dtype for side, dtype in runs if side == IN_STEP]
    seconds |= {(limit, dtype): [] for limit in (PEAK, READ) for dtype in in_steps}
    seconds |= {(side, dtype): [] for side in ("before", "now") for dtype in pairs}
    keys, number = list(runs), 0
    while number < rounds:
        begin, turn = time.perf_counter(), number % len(keys)
        for key in keys[turn:] + keys[:turn]:
            if key[0] == IN_STEP:
                own, *at_best = beside(limits, runs[key])
                for limit, taken in zip((PEAK, READ), at_best, strict=True):
                    seconds[limit, key[1]].append(taken)
            else:
                own = runs[key]()
            seconds[key].append(own)
        for dtype, run in pairs.items():
            for side, taken in zip(("before", "now"), run(), strict=True):
                seconds[side, dtype].append(taken)
        if time.perf_counter() - begin > LONG_SECONDS:
            rounds = min(rounds, LONG_ROUNDS)
        number += 1
    return seconds


def beside(limits: Limits, run: Callable[[], float]) -> tuple[float, float, float]:
    """Seconds of a run, and of a multiply-add before it and a byte plainly read on either side.

    Their threads are not the run's, which take a while to find a processor each when they wake.
    """

    def read() -> float:
        time.sleep(SETTLE_SECONDS)
        return min(per_unit(lambda: limits.read(TOUCHED)) for _ in range(2))

    peak, before = per_unit(limits.multiply_add), read()
    end = time.perf_counter() + WAKE_SECONDS
    while time.perf_counter() < end:
        run()
    own, after = run(), read()
    return own, peak, (before + after) / 2


def repeated(function: Callable[[], object]) -> Callable[[], float]:
    """Times it often enough for the clock; the first calls are warm-up."""
    function()
    repeats = max(1, round(SAMPLE_SECONDS / timed(function)))
    return lambda: timed(function, repeats)


def pair(before: Before, key: str) -> Callable[[], tuple[float, float]]:
    """As `repeated`, in the processes of both commits."""
    before.run(key)
    repeats = max(1, round(SAMPLE_SECONDS / min(before.run(key))))
    return lambda: before.run(key, repeats)


def per_unit(work: Callable[[], float]) -> float:
    begin = time.perf_counter()
    units = work()
    return (time.perf_counter() - begin) / units


def report(threads: int, rounds: int, before: Before | None) -> None:
    """Measures and prints the table, row by row."""
    limits = Limits(threads, TOUCHED)
    bar = MANY_ROWS["avx512" if _has_avx512() else "avx2"]
    print(
        "\n| K x N, rows, type | ours | in a step | torch | oneDNN | ours / best of theirs "
        "| limit | share of limit | bar | before / ours |\n" + "|---" * 10 + "|"
    )
    for case in products():
        seconds = measure(case, limits, rounds, before)
        for dtype in [key[1] for key in seconds if key[0] == OURS]:
            print(row(case, dtype, seconds, bar), flush=True)
        if case.rows == max(ROWS):
            print(best_row(case, seconds, bar), flush=True)


def row(case: Product, dtype: str, seconds: Seconds, bar: float) -> str:
    """One type's figures: Gflop/s, for few rows GB/s."""
    few = case.rows <= FEW
    amount = case.read(dtype) if few else case.flops(dtype)
    unit = "GB/s" if few else "Gflop/s"

    def speed(side: str) -> str:
        own = seconds.get((side, dtype))
        return "" if own is None else f"{amount / statistics.median(own) / 1e9:.1f}"

    at_best = [case.flops(dtype) * peak for peak in seconds[PEAK, dtype if few else ""]]
    if few:
        # One row is held against the read alone, eight against whichever takes longer.
        reads = [case.read(dtype) * read for read in seconds[READ, dtype]]
        at_best = reads if case.rows == 1 else list(map(max, reads, at_best))
    mine = seconds[OURS, dtype]
    theirs = [seconds[side, dtype] for side in ("torch", "oneDNN") if (side, dtype) in seconds]
    ratio = f"{paired(min(theirs, key=statistics.median), mine):.2f}" if theirs else ""
    goal = {1: f"{ONE_ROW} (goal {ONE_ROW_GOAL})", 8: f"{EIGHT_ROWS}"}.get(case.rows, "")
    if case.rows == max(ROWS) and bar == MANY_ROWS["avx2"] and dtype == "float32":
        goal = f"ratio {bar}"
    earlier = seconds.get(("before", dtype))
    cells = [
        f"{case.k} x {case.n}, {case.rows}, {dtype}",
        f"{speed(OURS)} {unit}",
        speed(IN_STEP),
        speed("torch"),
        speed("oneDNN"),
        ratio,
        f"{amount / statistics.median(at_best) / 1e9:.1f}",
        f"{paired(at_best, seconds.get((IN_STEP, dtype), mine)):.2f}",
        f">= {goal}" if goal else "",
        "" if earlier is None else f"{paired(earlier, seconds['now', dtype]):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def best_row(case: Product, seconds: Seconds, bar: float) -> str:
    """Our fastest type against theirs, on a processor whose types differ in speed."""
    flops = case.flops("float32")  # As many in every type.

    def fastest(*sides: str) -> tuple[float, str]:
        of_side = {key: statistics.median(own) for key, own in seconds.items() if key[0] in sides}
        key = min(of_side, key=lambda key: of_side[key])
        return flops / of_side[key] / 1e9, key[1]

    (mine, own_type), (theirs, their_type) = fastest(OURS), fastest("torch", "oneDNN")
    goal = f">= ratio {bar}" if bar == MANY_ROWS["avx512"] else ""
    return (
        f"| {case.k} x {case.n}, {case.rows}, fastest types | {mine:.1f} Gflop/s ({own_type}) | "
        f"| | {theirs:.1f} ({their_type}) | {mine / theirs:.2f} | | | {goal} | |"
    )


def paired(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(other / own for other, own in zip(theirs, ours, strict=True))


def _has_avx512() -> bool:
    return emulated() is None and "AVX512" in torch.backends.cpu.get_cpu_capability()
