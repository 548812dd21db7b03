"""The variants that gpu_tune.py times: tiles, warps and stages of each op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from common.gpu_cases import (
    BATCH,
    STORED,
    TOKENS,
    decode_meta,
    gated_delta_inputs,
    half,
    pages,
    slices,
)
from common.gpu_few_codes import quantised
from common.gpu_few_rows import operands
from common.gpu_shapes import QWEN_27B, QWEN_35B_A3B
from vlm_serve.kernels.gated_delta import recurrent_gated_delta, step_triton
from vlm_serve.kernels.gated_delta import triton as gated_triton
from vlm_serve.kernels.linear import few_codes_triton, few_rows_triton, fixed_triton
from vlm_serve.kernels.linear.few_rows import Around, few_rows
from vlm_serve.kernels.linear.fixed import fixed_product
from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.kernels.moe import routed_experts
from vlm_serve.kernels.moe import triton as moe_triton
from vlm_serve.kernels.paged_attention import attention_decode, attention_prefill
from vlm_serve.kernels.paged_attention import triton as decode_triton
from vlm_serve.kernels.paged_attention import triton as prefill_triton
from vlm_serve.kernels.paged_attention.tiles_triton import AttentionTile
from vlm_serve.kernels.triton_support import launch
from vlm_serve.kernels.tuning import FIXED_STEPS, NARROW_BELOW

Change = tuple[Any, str, Any]
"""Module, name in it, and the value that the name gets."""


@dataclass(frozen=True)
class Variant:
    """A call under changed constants.

    Attributes:
        label: what differs.
        call: runs the op and returns its result.
        changes: what to replace while it is measured.
        op: name of the op in a table of tiles; "" if the variant is not for a table.
        fields: of the tile, as a table names them.
    """

    label: str
    call: Callable[[], torch.Tensor]
    changes: tuple[Change, ...] = ()
    op: str = ""
    fields: Mapping[str, int] = field(default_factory=dict)


def groups() -> Iterator[tuple[str, Callable[[], list[Variant]]]]:
    """Yield (name, builder of variants), the most valuable first; inputs live in the builder."""
    yield "attention decode bfloat16", lambda: _decode(STORED[0], _DECODE)
    yield "attention prefill bfloat16", lambda: _prefill(STORED[0], _PREFILL)
    yield "gated_delta decode", _step
    yield "steps with prompts", _fixed
    yield "fixed product 12352 x 2560", lambda: _fixed_tiles(12352, 2560)
    yield "fixed product, narrow 2560 x 9216", lambda: _fixed_tiles(2560, 9216)
    yield "few rows 12352 x 2560", lambda: _few_rows(12352, 2560)
    yield "few rows, narrow 2560 x 9216", lambda: _few_rows(2560, 9216)
    yield "few rows of codes 18432 x 2560", lambda: _few_codes(18432, 2560)
    yield "few rows of codes, narrow 2560 x 9216", lambda: _few_codes(2560, 9216)
    yield "routed experts 32", lambda: _experts(BATCH)
    yield "routed experts 4096", lambda: _experts(TOKENS)
    yield "attention decode float8", lambda: _decode(STORED[1], _CODES)
    yield "attention decode int8", lambda: _decode(STORED[2], _CODES)
    yield "attention prefill float8", lambda: _prefill(STORED[1], _PREFILL[:3])
    yield "attention prefill int8", lambda: _prefill(STORED[2], _PREFILL_INT8)


# (keys, warps, stages), with the most programs.
_DECODE = [
    (32, 4, 4, 1024),
    (32, 4, 3, 1024),
    (32, 4, 4, 512),
    (32, 4, 3, 512),
    (64, 4, 3, 1024),
    (32, 2, 4, 1024),
    (64, 8, 3, 1024),
    (32, 4, 5, 1024),
]
_CODES = [(32, 4, 4, 1024), (32, 2, 4, 1024), (32, 4, 3, 1024), (32, 4, 4, 512), (64, 4, 3, 1024)]
# (rows, keys, warps, stages)
_PREFILL = [
    (128, 32, 8, 3),
    (128, 32, 8, 4),
    (128, 32, 8, 2),
    (64, 32, 4, 3),
    (64, 64, 4, 2),
    (128, 64, 8, 2),
]
_PREFILL_INT8 = [(128, 16, 8, 3), (128, 16, 8, 2), (128, 32, 8, 2), (64, 32, 4, 3)]


# (columns, depth, warps, stages) of products of few rows; a table in kernels/tuning names them.
_FEW = [
    (32, 128, 4, 4),
    (16, 256, 2, 4),
    (16, 128, 2, 6),
    (32, 256, 4, 3),
    (64, 128, 4, 3),
    (16, 512, 4, 2),
]


# (rows, columns, depth, warps, stages) of products of any number of rows.
_FIXED = [
    (128, 128, 64, 8, 4),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 4, 4),
    (128, 256, 64, 8, 3),
    (64, 128, 64, 4, 4),
    (128, 64, 128, 4, 3),
]


def _fixed() -> list[Variant]:
    """Two products of 2 048 tokens, in and out, by the library and in fixed tiles: which of them
    steps with prompts should have."""
    pairs = [operands(12352, 2560)[1], operands(2560, 9216)[1]]
    rows = [half(2048, weight.shape[1]) for weight in pairs]

    def call(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return [product(x, weight) for x, weight in zip(rows, pairs, strict=True)][1]

    fixed = partial(call, partial(fixed_product, rows[0].device))
    return [
        Variant("library", partial(call, F.linear), (), FIXED_STEPS, {"fixed": 0}),
        Variant("fixed tiles", fixed, (), FIXED_STEPS, {"fixed": 1}),
    ]


def _fixed_tiles(columns: int, depth: int) -> list[Variant]:
    weight = operands(columns, depth)[1]
    x = half(2048, depth)

    def variant(own: tuple[int, int, int, int, int]) -> Variant:
        tile = fixed_triton.FixedTile(*own)
        label = "rows {}, columns {}, depth {}, warps {}, stages {}".format(*own)
        changes = ((fixed_triton, "tile_of", lambda *_: tile),)
        op = "fixed product, narrow" if columns < NARROW_BELOW else "fixed product"
        return Variant(
            label, partial(fixed_product, x.device, x, weight), changes, op, tile._asdict()
        )

    return [variant(each) for each in _FIXED]


def _few_rows(columns: int, depth: int) -> list[Variant]:
    x, weight, _ = operands(columns, depth)

    def variant(own: tuple[int, int, int, int]) -> Variant:
        tile = few_rows_triton.FewRowsTile(*own)
        label = "columns {}, depth {}, warps {}, stages {}".format(*own)
        changes = ((few_rows_triton, "tile_of", lambda *_: tile),)
        op = "few rows, narrow" if columns < NARROW_BELOW else "few rows"
        call = partial(few_rows, x[:1], weight, Around())
        return Variant(label, call, changes, op, tile._asdict())

    return [variant(each) for each in _FEW]


# (columns, lanes, warps, stages) of products of few rows with codes.
_FEW_CODES = [
    (16, 32, 4, 4),
    (8, 32, 4, 4),
    (8, 32, 4, 6),
    (8, 32, 2, 4),
    (4, 32, 4, 4),
    (16, 32, 8, 4),
    (4, 64, 4, 4),
    (32, 32, 4, 3),
]


def _few_codes(columns: int, depth: int) -> list[Variant]:
    """One row of int4 as a plain weight becomes while it is loaded."""
    x, weight = operands(columns, depth)[0], quantised("int4", columns, depth)

    def variant(own: tuple[int, int, int, int]) -> Variant:
        tile = few_codes_triton.FewCodesTile(*own)
        label = "columns {}, lanes {}, warps {}, stages {}".format(*own)
        changes = ((few_codes_triton, "tile_of", lambda *_: tile),)
        op = "few rows of codes, narrow" if columns < NARROW_BELOW else "few rows of codes"
        return Variant(label, partial(weight, x[:1]), changes, op, tile._asdict())

    return [variant(each) for each in _FEW_CODES]


def _decode(dtype: torch.dtype, tiles: list[tuple[int, int, int, int]]) -> list[Variant]:
    shapes = QWEN_27B
    q = half(BATCH, shapes.query_heads, shapes.head_dim)
    kv, meta = pages(shapes, BATCH * TOKENS, dtype), decode_meta(TOKENS)

    def call() -> torch.Tensor:
        return attention_decode(q, kv, meta, scale=shapes.head_dim**-0.5)

    def variant(keys: int, warps: int, stages: int, programs: int) -> Variant:
        tile = AttentionTile(16, keys, warps, stages)
        changes = (
            (decode_triton, "decode_tile", lambda *_: tile),
            (decode_triton, "PROGRAMS", programs),
        )
        label = f"keys {keys}, warps {warps}, stages {stages}, programs {programs}"
        # Tables have one tile for all types of pages, and no number of programs.
        known = dtype == STORED[0] and programs == decode_triton.PROGRAMS
        op = f"attention decode, head dim {shapes.head_dim}" if known else ""
        fields = {"keys": keys, "warps": warps, "stages": stages}
        return Variant(label, call, changes, op, fields)

    return [variant(*each) for each in tiles]


def _prefill(dtype: torch.dtype, tiles: list[tuple[int, int, int, int]]) -> list[Variant]:
    shapes = QWEN_27B
    q = half(TOKENS, shapes.query_heads, shapes.head_dim)
    kv, meta = pages(shapes, TOKENS, dtype), slices(TOKENS)

    def call() -> torch.Tensor:
        return attention_prefill(q, kv, meta, scale=shapes.head_dim**-0.5)

    def variant(rows: int, keys: int, warps: int, stages: int) -> Variant:
        tile = AttentionTile(rows, keys, warps, stages)
        label = f"rows {rows}, keys {keys}, warps {warps}, stages {stages}"
        return Variant(label, call, ((prefill_triton, "prefill_tile", lambda *_: tile),))

    return [variant(*each) for each in tiles]


def _with_warps(warps: int) -> Callable[..., None]:
    """Return `launch` with another number of warps."""

    def launched(kernel: Any, grid: tuple[int, ...], arguments: Any, **options: Any) -> None:
        launch(kernel, grid, arguments, **{**options, "num_warps": warps})

    return launched


def _step() -> list[Variant]:
    shapes = QWEN_27B
    inputs = gated_delta_inputs(shapes, BATCH)
    # Rows that are read are not written, so every run has the same result.
    rows, others = tuple(range(BATCH)), tuple(range(BATCH, 2 * BATCH))
    meta = DecodeMeta(((0,),) * BATCH, (1,) * BATCH, rows, others, (-1,) * BATCH)
    size = (2 * BATCH, shapes.value_heads, shapes.state_dim, shapes.state_dim)
    state = torch.randn(size, device="cuda")

    def call() -> torch.Tensor:
        return recurrent_gated_delta(*inputs, state, meta)

    def variant(columns: int, warps: int) -> Variant:
        changes = (
            (step_triton, "STEP_COLUMNS", columns),
            (gated_triton, "STEP_COLUMNS", columns),
            (gated_triton, "launch", _with_warps(warps)),
        )
        return Variant(f"columns {columns}, warps {warps}", call, changes)

    return [variant(*each) for each in ((32, 4), (128, 8), (128, 16), (64, 4), (64, 8), (16, 2))]


def _experts(tokens: int) -> list[Variant]:
    shapes = QWEN_35B_A3B
    gate_up = half(shapes.experts, 2 * shapes.expert_width, shapes.hidden) * 0.02
    down = half(shapes.experts, shapes.hidden, shapes.expert_width) * 0.04
    x = half(tokens, shapes.hidden)
    weights, ids = torch.rand(tokens, shapes.experts, device="cuda").topk(shapes.top_k, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()

    def call() -> torch.Tensor:
        return routed_experts(x, weights, ids, gate_up, down)

    def variant(rows: int, columns: int, depth: int) -> Variant:
        tile = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}
        label = f"rows {rows}, columns {columns}, depth {depth}"
        return Variant(label, call, ((moe_triton, "_tile", lambda *_: dict(tile)),))

    if tokens == BATCH:
        tiles = [(16, 64, 64), (16, 64, 128), (16, 32, 128), (16, 128, 64)]
    else:
        tiles = [(64, 64, 64), (128, 64, 64), (128, 128, 64), (64, 128, 64)]
    return [variant(*each) for each in tiles]
