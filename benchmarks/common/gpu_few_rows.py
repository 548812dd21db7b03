"""Cases of kernels_gpu.py for decode steps at small batch: products of few rows beside torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.gpu_bench import Bench
from common.gpu_shapes import QWEN_4B
from common.gpu_work import Work
from vlm_serve.kernels.elementwise import silu_times
from vlm_serve.kernels.linear.few_rows import MOST_ROWS, Around, few_rows
from vlm_serve.kernels.norms import rms_norm

LATENCY = 4e-6
"""Seconds until the first weights of a program arrive, and of its last sums."""
EPS = 1e-6


def operands(columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, a weight with products of about 1, and a norm."""
    x = torch.randn(MOST_ROWS, depth, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5
    return x, weight, torch.randn(depth, device="cuda", dtype=torch.bfloat16) * 0.1


def run(bench: Bench) -> None:
    """Add norm and product in, gate with up, and product out, of one row and of eight."""
    shapes = QWEN_4B
    mixed = shapes.conv_channels + shapes.value_heads * (shapes.state_dim + 2)
    for name, columns, depth, gated in (
        ("norm and product in", mixed, shapes.hidden, False),
        ("norm, gate and up", 2 * 9216, shapes.hidden, True),
        ("product out", shapes.hidden, shapes.value_heads * shapes.state_dim, False),
    ):
        x, weight, norm = operands(columns, depth)
        out = name == "product out"
        around = Around() if out else Around(norm, EPS, gated=gated)
        for rows in (1, MOST_ROWS):
            _case(bench, f"{name}, {rows} rows", x[:rows], weight, around, norm)


def _case(
    bench: Bench,
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    around: Around,
    norm: torch.Tensor,
) -> None:
    def apart() -> torch.Tensor:
        wide = F.linear(x if around.norm is None else rms_norm(x, norm, EPS), weight)
        return silu_times(*wide.chunk(2, dim=1)) if around.gated else wide

    expected, found = apart().double(), few_rows(x, weight, around).double()
    bench.add(
        name,
        lambda: few_rows(x, weight, around),
        Work(weight.nbytes, chain=LATENCY),
        error=float((found - expected).abs().max() / expected.abs().max()),
    )
    bench.add(f"{name}, by torch", apart)
