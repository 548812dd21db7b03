"""Calls of the ops of adapters at the shapes of the shared checkpoints; see `aot_cases`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from common.gpu_shapes import Shapes
from vlm_serve.kernels.linear.base import Epilogue
from vlm_serve.kernels.linear.few_rows import MOST_ROWS, Around, few_rows
from vlm_serve.kernels.linear.fixed import fixed_product
from vlm_serve.kernels.linear.low_rank import _reduced, extended
from vlm_serve.kernels.linear.low_rank_factors import (
    RECORD,
    SPAN,
    ExpertSites,
    Groups,
    Reduced,
    Site,
)
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.moe import _experts as routed

TOKENS = 512
RANK = 64
CPU = torch.device("cpu")

Case = tuple[str, Callable[[], object]]


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def changed(shapes: Shapes) -> Iterator[Case]:
    """Products of rows with adapters: u, a few rows' products with it, and sums of many rows."""
    few, many = _site(MOST_ROWS), _site(TOKENS)
    columns, norm = 4 * shapes.hidden, half(shapes.hidden)
    for x, site in ((half(MOST_ROWS, shapes.hidden), few), (half(TOKENS, shapes.hidden), many)):
        own = norm if site is few else None
        change = _u(x, site)
        yield "low_rank", partial(_reduced, CPU, x, own, site)
        out = half(len(x), columns)
        for after in (Epilogue(), Epilogue(plus=out)):
            yield "low_rank", partial(extended, CPU, out, out.float(), after, change)
    x, weight = half(TOKENS, shapes.hidden), half(columns, shapes.hidden)
    plus = half(TOKENS, columns)
    own = partial(fixed_product, CPU, x, weight, change=_u(x, many))
    yield "fixed changed", partial(own, after=Epilogue(plus=plus))
    yield "fixed changed alone", partial(own, after=Epilogue("gelu_tanh"), into=plus)
    x, change = half(MOST_ROWS, shapes.hidden), _u(x[:MOST_ROWS], few)
    for kind, around in (
        ("in", Around(norm, 1e-6, change=change)),
        ("gated", Around(norm, 1e-6, gated=True, change=change)),
        ("out", Around(plus=half(MOST_ROWS, columns), overwrite=True, change=change)),
        ("head", Around(norm, 1e-6, widened=True, change=change)),
    ):
        yield f"few_rows changed {kind}", partial(few_rows, x, weight, around)


def activated(hidden: int, columns: int) -> Callable[[], object]:
    """Return a call of what follows a product with adapters in an MLP without gates."""
    out, change = half(TOKENS, columns), _u(half(TOKENS, hidden), _site(TOKENS, 1))
    return partial(extended, CPU, out, out.float(), Epilogue("relu2"), change)


def _u(x: torch.Tensor, site: Site) -> Reduced:
    return Reduced(torch.empty(-(-x.shape[1] // SPAN), len(x), site.width), site)


def _site(rows: int, parts: int = 4) -> Site:
    """A projection of some parts, changed for all rows by two adapters of rank 64 at most."""
    groups = Groups.of([row % 2 for row in range(rows)], CPU)
    return Site(groups, torch.zeros(2, RECORD, dtype=torch.int64), parts * RANK)


def changed_experts(
    shapes: Shapes, codes: Mapping[str, Callable[[int, int], Stored]]
) -> Iterator[Case]:
    """Experts of rows with adapters: a decode step, a small prefill and a large one, and a decode
    step with quantised weights."""
    count, width, hidden = shapes.experts, shapes.expert_width, shapes.hidden
    plain = half(count, 2 * width, hidden), half(count, hidden, width)
    for tokens in (32, 512, 4096):
        yield "moe changed", routed_with_adapters(shapes, tokens, *plain)
    for name, of_size in codes.items():
        stored = of_size(count * 2 * width, hidden), of_size(count * hidden, width)
        yield f"moe changed {name}", routed_with_adapters(shapes, 32, *stored)


def routed_with_adapters(
    shapes: Shapes, tokens: int, gate_up: torch.Tensor | Stored, down: torch.Tensor | Stored
) -> Callable[[], object]:
    """Return a call of routed experts of rows with adapters."""
    ids = torch.zeros(tokens, shapes.top_k, dtype=torch.int64)
    x, weights = half(tokens, shapes.hidden), half(tokens, shapes.top_k)
    sites = ExpertSites(_site(tokens, 2), _site(tokens, 1))
    return partial(routed, CPU, x, weights, ids, gate_up, down, deterministic=False, sites=sites)
