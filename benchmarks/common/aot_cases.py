"""Calls of every op at the shapes of the shared checkpoints, on memory that is never touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from common.aot_changed import Case, changed, changed_experts, half
from common.gpu_shapes import ALL, Shapes
from vlm_serve.kernels.causal_conv import (
    causal_conv_decode,
    causal_conv_prefill,
    causal_conv_verify,
)
from vlm_serve.kernels.causal_conv.reference import Behind
from vlm_serve.kernels.elementwise import silu_times, times_sigmoid
from vlm_serve.kernels.gated_delta import (
    chunk_gated_delta,
    gates,
    recurrent_gated_delta,
    verify_gated_delta,
)
from vlm_serve.kernels.gated_delta.decoding import Mixing, mix_decode
from vlm_serve.kernels.kv_write import copy_kv_rows, rotate_and_write, write_kv
from vlm_serve.kernels.linear.base import Epilogue
from vlm_serve.kernels.linear.few_rows import MOST_ROWS, Around, few_rows
from vlm_serve.kernels.linear.fixed import fixed_product
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta, Updates, VerifyMeta
from vlm_serve.kernels.moe import route, routed_experts
from vlm_serve.kernels.moe.reference import Addends
from vlm_serve.kernels.norms import Normed, gated_rms_norm, rms_norm
from vlm_serve.kernels.paged_attention import (
    attention_decode,
    attention_prefill,
)
from vlm_serve.kernels.rope import Rotation, qk_norm_rope
from vlm_serve.kernels.rope.halves import rotate_halves
from vlm_serve.kernels.sampling import Found, Rows, sample_rows
from vlm_serve.kernels.segment_attention import segment_attention
from vlm_serve.kernels.state_copy import copy_rows

BLOCK = 64
BLOCKS = 64
TOKENS = 512
BATCH = 32
DRAFTED = 8
LONGEST = 32768
STATE_ROWS = 32
VOCABULARY = 248_320
CPU = torch.device("cpu")
KV_DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.uint8)


def cases(models: Sequence[str]) -> Iterator[Case]:
    """(label, call) of every op, checkpoint and stored form; record what each call launches."""
    for shapes in ALL:
        if shapes.name not in models:
            continue
        yield from _memory_ops(shapes)
        yield from _elementwise(shapes)
        yield from _joined(shapes)
        yield from changed(shapes)
        yield from _state_ops(shapes)
        yield from _attention(shapes)
        yield from _quantised(shapes)
        if shapes.experts:
            yield from _experts(shapes)
            yield from changed_experts(shapes, CODES)
    yield from _segments()
    yield "sampling", _sampling


def _memory_ops(shapes: Shapes) -> Iterator[Case]:
    state = torch.empty(STATE_ROWS, shapes.value_heads, shapes.state_dim, shapes.state_dim)
    tails = torch.empty(STATE_ROWS, shapes.conv_channels, 3, dtype=torch.bfloat16)
    yield "state_copy", partial(copy_rows, [tails, state], [0, 1], [2, 3])
    for dtype in KV_DTYPES:
        kv, pool, scales = pages(shapes, dtype)
        k = torch.empty(TOKENS, shapes.kv_heads, shapes.head_dim, dtype=torch.bfloat16)
        slots = torch.empty(TOKENS, dtype=torch.int64)
        yield "kv_write", partial(write_kv, k, k, kv, slots)
        yield "kv_copy", partial(copy_kv_rows, pool, scales, [(0, 1, 5)])


def _elementwise(shapes: Shapes) -> Iterator[Case]:
    hidden, weight = half(TOKENS, shapes.hidden), half(shapes.hidden)
    yield "norms", partial(rms_norm, hidden, weight, 1e-6)
    heads = half(TOKENS, shapes.value_heads, shapes.state_dim)
    yield "norms", partial(gated_rms_norm, heads, heads, half(shapes.state_dim), 1e-6)
    yield "elementwise", partial(silu_times, hidden, hidden)
    yield "elementwise", partial(times_sigmoid, hidden, hidden[:, :1])
    raw = half(TOKENS, 2 * shapes.value_heads)
    factors = torch.empty(shapes.value_heads)
    yield "elementwise", partial(gates, raw, factors, factors)
    q = half(TOKENS, shapes.query_heads, 2 * shapes.head_dim)[..., : shapes.head_dim]
    k = half(TOKENS, shapes.kv_heads, shapes.head_dim)
    weight, angles = half(shapes.head_dim), torch.empty(TOKENS, shapes.rotated // 2)
    yield "rope", partial(qk_norm_rope, q, k, Rotation(weight, weight, angles, angles, 1e-6))


def _joined(shapes: Shapes) -> Iterator[Case]:
    """What decode steps run: ops that do several others' work, and products of few rows."""
    heads, dim, width = shapes.value_heads, shapes.state_dim, shapes.query_heads * shapes.head_dim
    tails = half(STATE_ROWS, 2, shapes.conv_channels, shapes.conv_taps - 1)[:, 0]
    state = torch.empty(STATE_ROWS, 2, heads, dim, dim)[:, 0]
    factors, norm = torch.empty(heads), torch.empty(dim)
    conv = half(shapes.conv_channels, shapes.conv_taps)
    mixing = Mixing(conv, factors, factors, norm, 1e-6, tails, state)
    columns = shapes.conv_channels + heads * dim + 2 * heads
    few, many = decode_meta(MOST_ROWS), decode_meta()
    yield "mix_decode", partial(mix_decode, half(MOST_ROWS, columns), mixing, few)
    yield "mix_decode", partial(mix_decode, half(BATCH, columns), mixing, many)
    weight, angles = half(shapes.head_dim), torch.empty(TOKENS, shapes.rotated // 2)
    rotation = Rotation(weight, weight, angles, angles, 1e-6)
    q = half(TOKENS, shapes.query_heads, 2 * shapes.head_dim)[..., : shapes.head_dim]
    k = half(TOKENS, shapes.kv_heads, shapes.head_dim)
    slots = torch.empty(TOKENS, dtype=torch.int64)
    for dtype in KV_DTYPES:
        yield (
            "rotate_write",
            partial(rotate_and_write, q, k, k, rotation, pages(shapes, dtype)[0], slots),
        )
    x, norm = half(MOST_ROWS, shapes.hidden), half(shapes.hidden)
    inner = half(MOST_ROWS, width)
    for kind, own, weight, around in (
        ("in", x, half(columns, shapes.hidden), Around(norm, 1e-6)),
        ("gated", x, half(8 * shapes.hidden, shapes.hidden), Around(norm, 1e-6, gated=True)),
        ("out", inner, half(shapes.hidden, width), Around(plus=x, overwrite=True)),
        ("head", x, half(64 * shapes.hidden, shapes.hidden), Around(norm, 1e-6, widened=True)),
    ):
        yield f"few_rows {kind}", partial(few_rows, own, weight, around)
    own = partial(few_rows, x.float(), half(columns, shapes.hidden).float(), Around(norm, 1e-6))
    yield "few_rows fp32", own
    x, plus = half(TOKENS, shapes.hidden), half(TOKENS, shapes.hidden)
    wide = half(columns, shapes.hidden)
    yield "fixed in", partial(fixed_product, CPU, x, wide)
    after = Epilogue(plus=plus, overwrite=True)
    own = partial(fixed_product, CPU, half(TOKENS, width), half(shapes.hidden, width))
    yield "fixed out", partial(own, after=after)
    yield "fixed sums", partial(own, kind=torch.float32)
    yield "fixed fp32", partial(fixed_product, CPU, x.float(), wide.float())
    own = half(MOST_ROWS, shapes.hidden)
    yield "few_rows plain", partial(few_rows, own, half(shapes.hidden, shapes.hidden), Around())


def _state_ops(shapes: Shapes) -> Iterator[Case]:
    weight = half(shapes.conv_channels, shapes.conv_taps)
    tails = half(STATE_ROWS, 2, shapes.conv_channels, shapes.conv_taps - 1)[:, 0]
    x = half(TOKENS, shapes.conv_channels)
    yield "causal_conv", partial(causal_conv_prefill, x, weight, tails, prefill_meta())
    x = half(BATCH, shapes.conv_channels)
    yield "causal_conv", partial(causal_conv_decode, x, weight, tails, decode_meta())
    short = Behind(half(shapes.conv_channels), silu=False)
    yield "causal_conv plain", partial(causal_conv_decode, x, weight, tails, decode_meta(), short)
    x, inputs = (
        half(BATCH * DRAFTED, shapes.conv_channels),
        _updates(shapes, BATCH * DRAFTED).inputs,
    )
    yield "causal_conv", partial(causal_conv_verify, x, weight, tails, inputs, verify_meta())
    for dtype, label in ((torch.bfloat16, "gated_delta"), (torch.float32, "gated_delta fp32")):
        state = torch.empty(STATE_ROWS, 2, shapes.value_heads, shapes.state_dim, shapes.state_dim)[
            :, 0
        ]
        arguments = _gated_delta_inputs(shapes, TOKENS, dtype)
        yield label, partial(chunk_gated_delta, *arguments, state, prefill_meta())
        arguments = _gated_delta_inputs(shapes, BATCH, dtype)
        yield label, partial(recurrent_gated_delta, *arguments, state, decode_meta())
        arguments = _gated_delta_inputs(shapes, BATCH * DRAFTED, dtype)
        updates = _updates(shapes, BATCH * DRAFTED)
        yield label, partial(verify_gated_delta, *arguments, state, updates, verify_meta())


def _attention(shapes: Shapes) -> Iterator[Case]:
    scale = shapes.head_dim**-0.5
    forms = [(torch.bfloat16, dtype) for dtype in KV_DTYPES] + [(torch.float32, torch.float32)]
    for dtype, stored in forms:
        kv = pages(shapes, stored)[0]
        label = f"attention {str(dtype)[6:]} on {str(stored)[6:]}"
        q = torch.empty(TOKENS, shapes.query_heads, shapes.head_dim, dtype=dtype)
        yield label, partial(attention_prefill, q, kv, prefill_meta(), scale=scale)
        # Sums of parts are merged behind a long prefix, and in every step of a CUDA graph.
        yield label, partial(attention_prefill, q, kv, prefill_meta(LONGEST), scale=scale)
        for meta in (decode_meta(), decode_meta(1, LONGEST // BLOCK)):
            q = torch.empty(len(meta), shapes.query_heads, shapes.head_dim, dtype=dtype)
            yield label, partial(attention_decode, q, kv, meta, scale=scale)
        gate = q.flatten(1)
        for meta in (decode_meta(), decode_meta(1, LONGEST // BLOCK)):
            own = q[:1].expand(len(meta), -1, -1)
            rows = gate[:1].expand(len(meta), -1)
            gated = partial(attention_decode, own, kv, meta, rows, scale=scale)
            yield f"{label}, gated", gated
        # As in the layer for drafts.
        yield f"{label}, gated", partial(gated, first_key=1)


def _segments() -> Iterator[Case]:
    """Attention of the vision towers, whose heads have 64 or 72 dimensions."""
    tiles = torch.zeros(BATCH, 3, dtype=torch.int32)
    for dtype, label in ((torch.bfloat16, "segments"), (torch.float32, "segments fp32")):
        for dim in (64, 72):
            qkv = torch.empty(TOKENS, 3, 16, dim, dtype=dtype)
            q, k, v = qkv.unbind(1)
            yield label, partial(segment_attention, q, k, v, tiles, scale=dim**-0.5)
            turns = torch.empty(2, TOKENS, dim // 2)
            yield f"{label}, rotation", partial(rotate_halves, qkv[:, :2], turns)


def _sampling() -> None:
    """A step of all kinds of rows: what differs between vocabularies is the number of parts."""
    rows = Rows(
        torch.empty(BATCH, 8, dtype=torch.float64),
        torch.empty(BATCH, 10, dtype=torch.int32),
        torch.empty(1, VOCABULARY // 8, dtype=torch.uint8),
        torch.empty(1, dtype=torch.int32),
        torch.empty(1),
        torch.empty(BATCH, dtype=torch.int64),
    )
    found = Found(torch.empty(2, BATCH, 1, dtype=torch.int32), torch.empty(BATCH).long())
    counts = torch.empty(1, VOCABULARY, dtype=torch.int32)
    sample_rows(torch.empty(BATCH, VOCABULARY), rows, counts, found)


def _experts(shapes: Shapes) -> Iterator[Case]:
    """A decode step, a small prefill and a large one: one row tile each."""
    for tokens in (BATCH, 512, 4096):
        yield "moe", partial(route, half(tokens, shapes.experts), shapes.top_k)
        ids = torch.zeros(tokens, shapes.top_k, dtype=torch.int64)
        gate_up = half(shapes.experts, 2 * shapes.expert_width, shapes.hidden)
        down = half(shapes.experts, shapes.hidden, shapes.expert_width)
        weights = half(tokens, shapes.top_k)
        x = half(tokens, shapes.hidden)
        yield "moe", partial(routed_experts, x, weights, ids, gate_up, down)
        addends = Addends(x, x, weights[:, :1])
        yield (
            "moe, beside",
            partial(routed_experts, x, weights, ids, gate_up, down, addends=addends),
        )


def _quantised(shapes: Shapes) -> Iterator[Case]:
    """A decode step, a small batch of them and a prefill, in every format, and experts."""
    sizes = (MOST_ROWS + 1, BATCH, TOKENS)
    pairs = [(torch.bfloat16, tokens) for tokens in sizes] + [(torch.float32, TOKENS)]
    hidden = shapes.hidden
    if shapes is ALL[0]:
        yield from _few_codes(hidden)
    for name, of_size in CODES.items():
        weight = TorchQuantised(of_size(2 * hidden, hidden), 2 * hidden, hidden, None)
        for dtype, tokens in pairs:
            label = f"linear {name}" if dtype == torch.bfloat16 else f"linear {name} fp32"
            yield label, partial(weight, torch.empty(tokens, hidden, dtype=dtype))
        if not shapes.experts:
            continue
        count, width = shapes.experts, shapes.expert_width
        gate_up, down = of_size(count * 2 * width, hidden), of_size(count * hidden, width)
        for tokens in (BATCH, 512, 4096):
            ids = torch.zeros(tokens, shapes.top_k, dtype=torch.int64)
            x, weights = half(tokens, hidden), half(tokens, shapes.top_k)
            yield f"moe {name}", partial(routed_experts, x, weights, ids, gate_up, down)


def _few_codes(hidden: int) -> Iterator[Case]:
    """One row of codes, and as many as there may be; only the depth differs between models."""
    for name, of_size in CODES.items():
        weight = TorchQuantised(of_size(2 * hidden, hidden), 2 * hidden, hidden, None)
        for rows in (1, MOST_ROWS):
            plus = half(rows, 2 * hidden)
            yield f"few {name}", partial(weight, half(rows, hidden), plus=plus, overwrite=True)
        normed = Normed(x := half(MOST_ROWS, hidden), x[0], 1e-6)
        yield f"few {name}, gated", partial(weight.of_norm, normed, gated=True)
        yield f"few {name} fp32", partial(weight, torch.empty(MOST_ROWS, hidden))


def _integers(bits: int, columns: int, depth: int) -> Stored:
    """With zero points, which take a few registers more."""
    codes, groups = torch.empty(columns, depth * bits // 8, dtype=torch.uint8), depth // 128
    zeros = torch.empty(columns, groups, dtype=torch.uint8)
    return Stored(codes, torch.empty(columns, groups, dtype=torch.float16), bits, 128, zeros)


def _rooted(bits: int, columns: int, depth: int) -> Stored:
    """As a plain weight becomes while it is loaded."""
    codes = torch.empty(columns, depth * bits // 8, dtype=torch.uint8)
    roots = torch.empty(columns, depth // 32, dtype=torch.int8)
    return Stored(codes, roots, bits, 32, factors=torch.empty(columns))


def _float4(columns: int, depth: int) -> Stored:
    """As NVFP4 is."""
    codes = torch.empty(columns, depth // 2, dtype=torch.uint8)
    scales = torch.empty(columns, depth // 16, dtype=torch.float8_e4m3fn)
    return Stored(codes, scales, 4, 16, factors=torch.empty(columns), float4=True)


def _float8(columns: int, depth: int) -> Stored:
    codes = torch.empty(columns, depth, dtype=torch.float8_e4m3fn)
    return Stored(codes, half(columns, -(-depth // 128)), 8, 128)


CODES: dict[str, Callable[[int, int], Stored]] = {
    "int4": partial(_integers, 4),
    "int4 of one byte": partial(_rooted, 4),
    "int6": partial(_rooted, 6),
    "int8": partial(_integers, 8),
    "float4": _float4,
    "float8": _float8,
}


def _updates(shapes: Shapes, entries: int) -> Updates:
    keys, values, dim = shapes.key_heads, shapes.value_heads, shapes.state_dim
    return Updates(
        torch.empty(entries, 2, keys, dim)[:, 0],
        torch.empty(entries, 2, values, dim)[:, 0],
        torch.empty(entries, 2, values)[:, 0],
        half(entries, 2, shapes.conv_channels)[:, 0],
    )


def _gated_delta_inputs(
    shapes: Shapes, tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    keys, values, dim = shapes.key_heads, shapes.value_heads, shapes.state_dim
    fused = torch.empty(tokens, shapes.conv_channels, dtype=dtype)
    q, k, v = fused.split((keys * dim, keys * dim, values * dim), dim=1)
    g, beta = torch.empty(tokens, values), torch.empty(tokens, values, dtype=dtype)
    heads = (keys, keys, values)
    q, k, v = (x.unflatten(1, (n, dim)) for x, n in zip((q, k, v), heads, strict=True))
    return q, k, v, g, beta


def prefill_meta(start: int = BLOCK) -> PrefillMeta:
    """One slice of TOKENS tokens in whole chunks behind `start` others, its blocks in order."""
    return PrefillMeta(
        cu_seqlens=(0, TOKENS),
        starts=(start,),
        block_tables=(tuple(block % BLOCKS for block in range((start + TOKENS) // BLOCK)),),
        src_rows=(0,),
        dst_rows=(1,),
        chunk_ends=(tuple(range(BLOCK, TOKENS + 1, BLOCK)),),
        snapshots=((0, 1, 2),),
    )


def decode_meta(batch: int = BATCH, blocks: int = BLOCKS // 2) -> DecodeMeta:
    """Sequences of so many blocks each, all of them the same ones."""
    return DecodeMeta(
        block_tables=(tuple(block % BLOCKS for block in range(blocks)),) * batch,
        kv_lens=(BLOCK * blocks,) * batch,
        src_rows=tuple(range(batch)),
        dst_rows=tuple(range(batch)),
        snapshot_rows=(-1,) * batch,
    )


def verify_meta() -> VerifyMeta:
    """As many drafted tokens for each sequence."""
    return VerifyMeta(
        cu_seqlens=tuple(range(0, BATCH * DRAFTED + 1, DRAFTED)),
        starts=(BLOCK,) * BATCH,
        block_tables=((0, 1),) * BATCH,
        rows=tuple(range(BATCH)),
        updates=tuple(range(0, BATCH * DRAFTED, DRAFTED)),
        folded=(DRAFTED,) * BATCH,
    )


def pages(shapes: Shapes, dtype: torch.dtype) -> tuple[KVLayer, torch.Tensor, torch.Tensor | None]:
    """One layer of a pool of pages: (layer, pool, scales)."""
    pool = torch.empty(BLOCKS, 1, 2, BLOCK, shapes.kv_heads, shapes.head_dim, dtype=dtype)
    if dtype != torch.uint8:
        return KVLayer(pool[:, 0, 0], pool[:, 0, 1]), pool, None
    scales = torch.empty(BLOCKS, 1, 4, BLOCK, shapes.kv_heads, dtype=torch.float16)
    parts = [scales[:, 0, i] for i in range(4)]
    return KVLayer(pool[:, 0, 0], pool[:, 0, 1], *parts), pool, scales
