"""Cases of kernels_gpu.py for decode steps at small batch: products with quantised weights."""

from __future__ import annotations

import torch

from common.gpu_bench import Bench
from common.gpu_few_rows import LATENCY, operands
from common.gpu_shapes import QWEN_4B
from common.gpu_work import Work
from vlm_serve.kernels.linear.codes import Codes, Float8Codes, IntegerCodes
from vlm_serve.kernels.linear.few_rows import MOST_ROWS
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised

KINDS = ("int4", "int8", "float8")
OUTSIDE_TENSOR_CORES = 67 / 989
"""Share of an H100's dense bfloat16 rate that its float32 units have."""
CONVERSION = 3.0
"""Instructions that a code takes before its products. Each row takes 1.25 more: the product, and a
conversion of an activation for every four columns."""


def quantised(kind: str, columns: int, depth: int) -> TorchQuantised:
    """Return a weight of random codes, with products of about 1."""
    random = torch.Generator().manual_seed(columns + depth)
    shape = (columns, depth)
    codes: Codes
    if kind == "float8":
        numbers = torch.randn(shape, generator=random).to(torch.float8_e4m3fn)
        blocks = (-(-columns // 128), -(-depth // 128))
        codes = Float8Codes(numbers, torch.full(blocks, depth**-0.5), (128, 128))
    elif kind == "int8":
        whole = torch.randint(256, shape, generator=random, dtype=torch.uint8)
        scales = torch.full((columns, depth // 128), depth**-0.5 / 74).bfloat16()
        codes = IntegerCodes(whole, scales, None, 8, 128)
    else:
        whole = torch.randint(16, shape, generator=random, dtype=torch.uint8)
        roots = torch.randint(90, 128, (columns, depth // 32), generator=random, dtype=torch.int8)
        codes = IntegerCodes(whole, roots, None, 4, 32, torch.full((columns,), 2.0**-22))
    return TorchQuantised.of([codes], columns, depth, None, torch.device("cuda"))


def run(bench: Bench) -> None:
    """Add gate with up, and the product down, of one row and of eight."""
    for name, columns, depth in (
        ("gate and up", 2 * 9216, QWEN_4B.hidden),
        ("down", QWEN_4B.hidden, 9216),
    ):
        x = operands(16, depth)[0]
        for kind in KINDS:
            weight = quantised(kind, columns, depth)
            expected = x.double() @ weight._weight.plain(slice(None)).double().T
            for rows in (1, MOST_ROWS):
                own, exact = x[:rows], expected[:rows]
                error = float((weight(own).double() - exact).abs().max() / exact.abs().max())
                bench.add(
                    f"{kind} {name}, {rows} rows",
                    lambda weight=weight, own=own: weight(own),
                    _work(weight, rows),
                    error=error,
                )


def _work(weight: TorchQuantised, rows: int) -> Work:
    """Return what a product has to do, by the instructions of the kernel's loop."""
    share = OUTSIDE_TENSOR_CORES * rows / (CONVERSION + 1.25 * rows)
    flops = 2.0 * rows * weight.columns * weight.depth
    return Work(weight.nbytes, flops=flops, share=share, chain=LATENCY)
