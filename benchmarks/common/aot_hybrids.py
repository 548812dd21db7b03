"""Calls of the ops of LFM2, Nemotron 3 and Granite 4, at the shapes of published checkpoints.

They are those of LFM2-8B-A1B, Nemotron 3 Nano 30B and Granite 4 H Small; see `aot_cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from common.aot_cases import (
    BATCH,
    BLOCK,
    CODES,
    DRAFTED,
    LONGEST,
    STATE_ROWS,
    TOKENS,
    decode_meta,
    pages,
    prefill_meta,
    verify_meta,
)
from common.aot_changed import Case, activated, half, routed_with_adapters
from common.gpu_shapes import Shapes
from vlm_serve.kernels.causal_conv import (
    causal_conv_decode,
    causal_conv_prefill,
    causal_conv_verify,
)
from vlm_serve.kernels.causal_conv.reference import Behind
from vlm_serve.kernels.gated_delta import (
    chunk_gated_delta,
    recurrent_gated_delta,
    step_lengths,
    verify_gated_delta,
)
from vlm_serve.kernels.kv_write import rotate_and_write
from vlm_serve.kernels.metadata import Updates
from vlm_serve.kernels.moe import route, routed_experts
from vlm_serve.kernels.moe.reference import Addends, Sigmoids
from vlm_serve.kernels.norms import gated_rms_norm, gated_squares
from vlm_serve.kernels.paged_attention import attention_decode, attention_prefill
from vlm_serve.kernels.rope import Rotation

STATES, DIM = 128, 64
"""State and head dimension of Mamba2."""


def _sizes(name: str, heads: tuple[int, int, int], moe: tuple[int, int, int], at: int) -> Shapes:
    """Return a checkpoint's heads (queries, keys, size), experts (number, of a token, width) and
    hidden size."""
    queries, keys, dim = heads
    experts, top_k, width = moe
    kinds = {"experts": experts, "top_k": top_k, "expert_width": width}
    return Shapes(name, at, queries, keys, 0, 0, head_dim=dim, rotated=dim, **kinds)


LFM2 = _sizes("lfm2", (32, 8, 64), (32, 4, 1792), 2048)
NEMOTRON = _sizes("nemotron", (32, 2, 128), (128, 6, 1856), 2688)
GRANITE = _sizes("granite", (32, 8, 128), (72, 10, 768), 4096)


def hybrids() -> Iterator[Case]:
    """(label, call) of every op; record what each call launches."""
    for shapes in (LFM2, NEMOTRON, GRANITE):
        yield from _attention(shapes)
        yield from _experts(shapes)
    yield from _convolutions("short_conv", 2048, 3, Behind(None, silu=False))
    for dtype, end in ((torch.bfloat16, ""), (torch.float32, " fp32")):
        yield from _mamba2(dtype, f"mamba2{end}", 128, 1)
        rows, weight = torch.empty(TOKENS, 1, 4096, dtype=dtype), half(1, 4096)
        yield f"mamba2 on ranks{end}", partial(gated_squares, rows, rows)
        own = partial(gated_rms_norm, rows, rows, weight, 1e-6, gate_first=True)
        yield f"mamba2 on ranks{end}", partial(own, mean=torch.empty(TOKENS, 1))
    yield from _mamba2(torch.bfloat16, "mamba2 in groups", 64, 8)
    yield "nemotron, low_rank", activated(NEMOTRON.hidden, 3712)


def _convolutions(label: str, channels: int, taps: int, behind: Behind) -> Iterator[Case]:
    weight, tails = half(channels, taps), half(STATE_ROWS, 2, channels, taps - 1)[:, 0]
    inputs = half(BATCH * DRAFTED, 2, channels)[:, 0]
    x = half(TOKENS, channels)
    yield label, partial(causal_conv_prefill, x, weight, tails, prefill_meta(), behind)
    yield label, partial(causal_conv_decode, x[:BATCH], weight, tails, decode_meta(), behind)
    x = half(BATCH * DRAFTED, channels)
    yield label, partial(causal_conv_verify, x, weight, tails, inputs, verify_meta(), behind)


def _mamba2(dtype: torch.dtype, label: str, heads: int, groups: int) -> Iterator[Case]:
    """A layer of Granite's, whose heads are in one group, or of Nemotron's."""
    width, factors = groups * STATES, torch.empty(heads)
    channels = heads * DIM + 2 * width
    pool = torch.empty(STATE_ROWS, 2, heads, STATES, DIM)[:, 0]
    updates = Updates(
        torch.empty(BATCH * DRAFTED, 2, groups, STATES)[:, 0],
        torch.empty(BATCH * DRAFTED, 2, heads, DIM)[:, 0],
        torch.empty(BATCH * DRAFTED, 2, heads)[:, 0],
        half(BATCH * DRAFTED, 2, channels)[:, 0],
    )

    def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
        x = torch.empty(tokens, channels, dtype=dtype)
        v, k, q = x.split_with_sizes((heads * DIM, width, width), 1)
        raw = torch.empty(tokens, heads, dtype=dtype)
        lengths, decay = step_lengths(raw, factors, factors, (0.0, float("inf")))
        k, q = (part.unflatten(1, (groups, STATES)) for part in (k, q))
        return q, k, v.unflatten(1, (heads, DIM)), decay, lengths

    ops: tuple[tuple[Callable[..., object], int, tuple[object, ...]], ...] = (
        (chunk_gated_delta, TOKENS, (prefill_meta(),)),
        (recurrent_gated_delta, BATCH, (decode_meta(),)),
        (verify_gated_delta, BATCH * DRAFTED, (updates, verify_meta())),
    )
    for op, tokens, rest in ops:
        yield (
            label,
            lambda op=op, tokens=tokens, rest=rest: op(  # type: ignore[misc]
                *inputs(tokens), pool, *rest, skip=factors
            ),
        )
    rows = torch.empty(TOKENS, groups, heads * DIM // groups, dtype=dtype)
    weight = half(*rows.shape[1:])
    yield label, partial(gated_rms_norm, rows, rows, weight, 1e-6, gate_first=True)
    if dtype == torch.bfloat16:
        yield from _convolutions(f"{label}, conv", channels, 4, Behind(half(channels)))


def _attention(shapes: Shapes) -> Iterator[Case]:
    """Heads of other sizes than Qwen3.5's, without gates; LFM2's have norms."""
    scale, dim = shapes.head_dim**-0.5, shapes.head_dim
    q, k = half(TOKENS, shapes.query_heads, dim), half(TOKENS, shapes.kv_heads, dim)
    norm, angles = half(dim) if shapes is LFM2 else None, torch.empty(TOKENS, dim // 2)
    rotation = Rotation(norm, norm, angles, angles, 1e-6)
    slots, kv = torch.empty(TOKENS, dtype=torch.int64), pages(shapes, torch.bfloat16)[0]
    label = f"{shapes.name}, attention"
    yield label, partial(rotate_and_write, q, k, k, rotation, kv, slots)
    for start in (BLOCK, LONGEST):
        yield label, partial(attention_prefill, q, kv, prefill_meta(start), scale=scale)
    for meta in (decode_meta(), decode_meta(1, LONGEST // BLOCK)):
        yield label, partial(attention_decode, q[: len(meta)], kv, meta, scale=scale)


def _experts(shapes: Shapes) -> Iterator[Case]:
    """A decode step and a large prefill; where experts have no gates, decode steps with codes and
    with adapters as well."""
    hidden, width, count = shapes.hidden, shapes.expert_width, shapes.experts
    gated = shapes is not NEMOTRON
    rows = (2 if gated else 1) * width
    plain = half(count, rows, hidden), half(count, hidden, width)
    sigmoids = None if shapes is GRANITE else Sigmoids(torch.empty(count))
    yield f"{shapes.name}, moe", partial(route, half(TOKENS, count), shapes.top_k, sigmoids)
    for tokens in (4096, BATCH):
        ids = torch.zeros(tokens, shapes.top_k, dtype=torch.int64)
        x, weights = half(tokens, hidden), half(tokens, shapes.top_k)
        own = partial(routed_experts, x, weights, ids)
        yield f"{shapes.name}, moe", partial(own, *plain, addends=Addends(x))
    if gated:
        return
    yield f"{shapes.name}, moe changed", routed_with_adapters(shapes, BATCH, *plain)
    for name, of_size in CODES.items():
        # Groups of 128 do not divide the width of 1856.
        deep = -(-width // 128) * 128
        stored = of_size(count * deep, hidden), of_size(count * hidden, deep)
        yield f"{shapes.name}, moe {name}", partial(own, *stored)
