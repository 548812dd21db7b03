"""The cases of kernels_gpu.py: 27B-shaped layers, compared with float64 and timed."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from kernel_oracles import (
    attention_reference,
    causal_conv_reference,
    gated_delta_reference,
    rms_norm_reference,
    routed_experts_reference,
)

from common import gpu_few_codes, gpu_few_rows
from common.gpu_bench import Bench
from common.gpu_shapes import QWEN_27B, QWEN_35B_A3B, Shapes
from common.gpu_work import Work
from vlm_serve.kernels.causal_conv import causal_conv_prefill
from vlm_serve.kernels.gated_delta import chunk_gated_delta, recurrent_gated_delta
from vlm_serve.kernels.kv_write import write_kv
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta
from vlm_serve.kernels.moe import routed_experts
from vlm_serve.kernels.norms import rms_norm
from vlm_serve.kernels.paged_attention import attention_decode, attention_prefill
from vlm_serve.kernels.state_copy import copy_rows

TOKENS = 4096
BLOCK = 64
BATCH = 32
DEVICE = "cuda"
STORED = (torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
LAUNCH = 2e-6
"""Seconds between two kernels of a graph."""
# Tokens of the shorter problem that is compared whole, to its last chunk, which is not full: the
# float64 references go token by token.
CHECKED = 230


def run(bench: Bench) -> None:
    torch.manual_seed(0)
    _gated_delta(bench, QWEN_27B)
    _gated_delta_decode(bench, QWEN_27B)
    _conv_and_norm(bench, QWEN_27B)
    _attention(bench, QWEN_27B)
    _attention_decode(bench, QWEN_27B)
    _experts(bench, QWEN_35B_A3B)
    _state_copy(bench, QWEN_27B)
    gpu_few_rows.run(bench)
    gpu_few_codes.run(bench)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.to(actual.device)
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def slices(tokens: int, snapshots: int = 0) -> PrefillMeta:
    """One cold sequence, states kept at even distances."""
    chunks = -(-tokens // BLOCK)
    return PrefillMeta(
        cu_seqlens=(0, tokens),
        starts=(0,),
        block_tables=(tuple(range(chunks)),),
        src_rows=(-1,),
        dst_rows=(0,),
        chunk_ends=((*range(BLOCK, tokens, BLOCK), tokens),),
        snapshots=tuple((0, i * chunks // snapshots, i + 1) for i in range(snapshots)),
    )


def gated_delta_inputs(shapes: Shapes, tokens: int) -> tuple[torch.Tensor, ...]:
    heads, dim = shapes.value_heads, shapes.state_dim
    return (
        half(tokens, shapes.key_heads, dim),
        half(tokens, shapes.key_heads, dim),
        half(tokens, heads, dim),
        -torch.rand(tokens, heads, device=DEVICE) * 0.1,
        torch.rand(tokens, heads, device=DEVICE).bfloat16(),
    )


def _gated_delta(bench: Bench, shapes: Shapes) -> None:
    heads, dim = shapes.value_heads, shapes.state_dim
    inputs = gated_delta_inputs(shapes, TOKENS)
    state = torch.full((9, heads, dim, dim), float("nan"), device=DEVICE)
    part = [x[:CHECKED, : 1 if x.shape[1] == shapes.key_heads else 3].cpu() for x in inputs]
    expected, states = gated_delta_reference(*part, None)
    few = chunk_gated_delta(*(x[:CHECKED] for x in inputs), state, slices(CHECKED))
    error = max(_error(few[:, :3], expected), _error(state[0, :3], states[-1]))
    moved = sum(x.nbytes for x in inputs) + inputs[2].nbytes + state[0].nbytes
    # Four products of the sequential pass, four of the chunks; 2 FLOPs per multiply-add.
    flops = 2 * TOKENS * heads * (3 * dim * dim + 5 * BLOCK * dim)
    # w, u and the squares of scores, all written once and read once.
    scratch = 2 * (2 * inputs[2].nbytes + TOKENS * heads * BLOCK * 2)
    # A chunk of the scan takes 5.5 us; 12 waves of inverses wait 31 rows of eight barriers each.
    chain = TOKENS // BLOCK * 5.5e-6 + 12 * 17e-6 + 2 * LAUNCH
    for count in (0, 8):
        meta = slices(TOKENS, count)
        bench.add(
            f"gated_delta prefill {TOKENS} tokens, {count} snapshots",
            lambda meta=meta: chunk_gated_delta(*inputs, state, meta),  # type: ignore[misc]
            Work(moved + count * state[0].nbytes, scratch, flops, chain=chain),
            error=error,
        )
    if importlib.util.find_spec("fla") is None:
        print("flash-linear-attention is not installed")
        return
    q, k, v, g, beta = (x.unsqueeze(0) for x in inputs)
    ratio = heads // shapes.key_heads
    q, k = q.repeat_interleave(ratio, 2), k.repeat_interleave(ratio, 2)
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        bench.add(
            "flash-linear-attention, the same",
            lambda: chunk_gated_delta_rule(
                q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
            ),
        )
    except Exception as error:  # It may refuse this Triton; our rows are to come all the same.
        print(f"flash-linear-attention: {type(error).__name__}: {str(error).splitlines()[0]}")


def decode_meta(keys: int) -> DecodeMeta:
    per_sequence = -(-keys // BLOCK)
    tables = [tuple(range(i * per_sequence, (i + 1) * per_sequence)) for i in range(BATCH)]
    rows = tuple(range(BATCH))
    return DecodeMeta(tuple(tables), (keys,) * BATCH, rows, rows, (-1,) * BATCH)


def _gated_delta_decode(bench: Bench, shapes: Shapes) -> None:
    inputs = gated_delta_inputs(shapes, BATCH)
    state = torch.randn(
        BATCH, shapes.value_heads, shapes.state_dim, shapes.state_dim, device=DEVICE
    )
    part = [x[:1, : 1 if x.shape[1] == shapes.key_heads else 3].cpu() for x in inputs]
    expected, _ = gated_delta_reference(*part, state[0, :3].cpu())
    meta = decode_meta(BLOCK)
    out = recurrent_gated_delta(*inputs, state, meta)
    bench.add(
        f"gated_delta decode, batch {BATCH}",
        lambda: recurrent_gated_delta(*inputs, state, meta),
        # Nine waves of programs that wait for a row, a tile and two sums.
        Work(2 * state.nbytes, chain=9 * 2e-6 + LAUNCH),
        error=_error(out[:1, :3], expected),
    )


def _conv_and_norm(bench: Bench, shapes: Shapes) -> None:
    x = half(TOKENS, shapes.conv_channels)
    weight = half(shapes.conv_channels, shapes.conv_taps)
    tails = torch.zeros(2, shapes.conv_channels, shapes.conv_taps - 1, device=DEVICE).bfloat16()
    meta = slices(TOKENS)
    few = causal_conv_prefill(x[:CHECKED], weight, tails, slices(CHECKED))
    expected, _ = causal_conv_reference(x[:CHECKED], weight, None)
    bench.add(
        "causal_conv prefill",
        lambda: causal_conv_prefill(x, weight, tails, meta),
        # 39 waves of programs that wait for four loads in turn.
        Work(2 * x.nbytes, chain=39 * 2.8e-6 + 2 * LAUNCH),
        error=_error(few, expected),
    )
    hidden, scale = half(TOKENS, shapes.hidden), half(shapes.hidden)
    bench.add(
        "rms_norm",
        lambda: rms_norm(hidden, scale, 1e-6),
        Work(2 * hidden.nbytes, chain=LAUNCH),
        error=_error(rms_norm(hidden, scale, 1e-6), rms_norm_reference(hidden, scale, 1e-6)),
    )


def pages(shapes: Shapes, tokens: int, dtype: torch.dtype) -> KVLayer:
    shape = (tokens // BLOCK, 2, BLOCK, shapes.kv_heads, shapes.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=DEVICE)
    scales = torch.zeros(tokens // BLOCK, 4, *shape[2:4], dtype=torch.float16, device=DEVICE)
    parts = [scales[:, i] if dtype == torch.uint8 else None for i in range(4)]
    kv = KVLayer(pool[:, 0], pool[:, 1], *parts)
    k, v = (half(tokens, shapes.kv_heads, shapes.head_dim) for _ in range(2))
    write_kv(k, v, kv, torch.arange(tokens, device=DEVICE))
    return kv


def _on_cpu(kv: KVLayer) -> KVLayer:
    return KVLayer(*(None if x is None else x.cpu() for x in vars(kv).values()))


def _attention(bench: Bench, shapes: Shapes) -> None:
    scale = shapes.head_dim**-0.5
    q = half(TOKENS, shapes.query_heads, shapes.head_dim)
    flops = 2 * TOKENS * TOKENS * shapes.query_heads * shapes.head_dim
    meta = slices(TOKENS)
    for dtype, share in zip(STORED, (0.44, 0.38, 0.2), strict=True):
        kv = pages(shapes, TOKENS, dtype)
        few = attention_prefill(q[:CHECKED], kv, slices(CHECKED), scale=scale)
        table = meta.block_tables[0]
        expected = attention_reference(q[:CHECKED].cpu(), _on_cpu(kv), table, 0, scale)
        bench.add(
            f"attention prefill {TOKENS} tokens on {dtype}",
            lambda kv=kv: attention_prefill(q, kv, meta, scale=scale),  # type: ignore[misc]
            # Products of 32 keys wait for shared memory; codes become values in registers.
            Work(flops=flops, share=share, chain=LAUNCH),
            error=_error(few, expected),
        )
    query = q.transpose(0, 1).unsqueeze(0)
    k, v = (
        half(1, shapes.kv_heads, TOKENS, shapes.head_dim).repeat_interleave(
            shapes.query_heads // shapes.kv_heads, 1
        )
        for _ in range(2)
    )
    bench.add(
        "SDPA on the unpaged problem",
        lambda: F.scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale),
        Work(flops=flops, share=0.73, chain=LAUNCH),
    )


def _attention_decode(bench: Bench, shapes: Shapes) -> None:
    scale = shapes.head_dim**-0.5
    q = half(BATCH, shapes.query_heads, shapes.head_dim)
    meta = decode_meta(TOKENS)
    for dtype, codes in zip(STORED, (0, 25e-6, 60e-6), strict=True):
        kv = pages(shapes, BATCH * TOKENS, dtype)
        out = attention_decode(q, kv, meta, scale=scale)
        first = KVLayer(*(None if x is None else x[: TOKENS // BLOCK] for x in vars(kv).values()))
        expected = attention_reference(
            q[:1].cpu(), _on_cpu(first), meta.block_tables[0], TOKENS - 1, scale
        )
        bench.add(
            f"attention decode, batch {BATCH} x {TOKENS} keys on {dtype}",
            lambda kv=kv: attention_decode(q, kv, meta, scale=scale),  # type: ignore[misc]
            # The first tile, the last one and the sum of the parts; conversions of codes.
            Work(2 * kv.k.nbytes, chain=10e-6 + codes + 2 * LAUNCH),
            error=_error(out[:1], expected),
        )


def _experts(bench: Bench, shapes: Shapes) -> None:
    gate_up = half(shapes.experts, 2 * shapes.expert_width, shapes.hidden) * 0.02
    down = half(shapes.experts, shapes.hidden, shapes.expert_width) * 0.04
    for tokens in (BATCH, TOKENS):
        x = half(tokens, shapes.hidden)
        probabilities = torch.rand(tokens, shapes.experts, device=DEVICE)
        weights, ids = probabilities.topk(shapes.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()
        out = routed_experts(x, weights, ids, gate_up, down)
        few = [t[:4].cpu() for t in (x, weights, ids)]
        expected = routed_experts_reference(*few, gate_up.cpu(), down.cpu())
        used = min(shapes.experts, tokens * shapes.top_k) / shapes.experts
        pairs = tokens * shapes.top_k
        bench.add(
            f"routed experts, {tokens} tokens",
            lambda x=x, w=weights, i=ids: routed_experts(x, w, i, gate_up, down),  # type: ignore[misc]
            Work(
                used * (gate_up.nbytes + down.nbytes),
                # Pairs of both products; each tile of 64 columns reads its rows of x again.
                scratch=pairs * (2 * shapes.hidden + 2 * shapes.expert_width) * 2,
                flops=6 * pairs * shapes.hidden * shapes.expert_width,
                share=0.3,
                chain=5 * LAUNCH + 10e-6,
            ),
            error=_error(out[:4], expected),
        )


def _state_copy(bench: Bench, shapes: Shapes) -> None:
    layers = 48
    row = (layers, shapes.value_heads, shapes.state_dim, shapes.state_dim)
    pool = torch.randn(8, *row, device=DEVICE)
    copy_rows([pool], [0, 2], [5, 7])
    assert torch.equal(pool[5], pool[0]) and torch.equal(pool[7], pool[2])
    bench.add(
        "state copy, 2 rows",
        lambda: copy_rows([pool], [0, 2], [5, 7]),
        Work(4 * pool[0].nbytes, chain=LAUNCH),
        captured=False,
    )
