"""Calls of every kernel on random inputs, each of which can be made again with equal ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from common.gpu_shapes import ALL, QWEN_4B, Shapes
from vlm_serve.kernels.causal_conv import causal_conv_decode, causal_conv_prefill
from vlm_serve.kernels.gated_delta import (
    chunk_gated_delta,
    recurrent_gated_delta,
    verify_gated_delta,
)
from vlm_serve.kernels.kv_write import write_kv
from vlm_serve.kernels.linear.quantising import group_of, quantise
from vlm_serve.kernels.linear.torch_quantised import TorchQuantised
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer, PrefillMeta, Updates, VerifyMeta
from vlm_serve.kernels.moe import route, routed_experts
from vlm_serve.kernels.norms import gated_rms_norm, rms_norm
from vlm_serve.kernels.paged_attention import attention_decode, attention_prefill

BLOCK = 64
# Returns all that the kernel wrote.
Case = Callable[[], list[torch.Tensor]]
Made = tuple[str, Callable[[], Case]]
LENGTHS = ((54,), (230, 65, 1), (1500, 700))
DRAFTED = 5
TINY = Shapes("tiny", 64, 4, 2, 2, 4, head_dim=64, rotated=16, state_dim=64)
PAGES = (torch.bfloat16, torch.float8_e4m3fn, torch.uint8)


def calls(device: str, small: bool) -> Iterator[Made]:
    """Yield (label, what makes the call) of every kernel; the shapes are tiny on a CPU."""
    if device == "cpu":
        models: tuple[Shapes, ...] = (replace(TINY, experts=4, top_k=2, expert_width=64),)
    else:
        models = (replace(QWEN_4B, experts=8, top_k=2, expert_width=128),) if small else ALL
    lengths = LENGTHS[:1] if small or device == "cpu" else LENGTHS
    for shapes in models:
        draw = Inputs(device, shapes)
        for slices in lengths:
            label = f"{shapes.name}, {'+'.join(map(str, slices))} tokens"
            yield f"gated_delta prefill, {label}", partial(draw.delta, slices)
            yield f"causal_conv prefill, {label}", partial(draw.conv, slices)
            for dtype in PAGES:
                where = f"{label}, pages {str(dtype)[6:]}"
                yield f"attention prefill, {where}", partial(draw.attend, slices, dtype)
        for batch in (1, 7) if small else (1, 7, 32):
            label = f"{shapes.name}, batch {batch}"
            yield f"gated_delta decode, {label}", partial(draw.step, batch)
            yield f"gated_delta drafts, {label}", partial(draw.verify, batch)
            yield f"causal_conv decode, {label}", partial(draw.conv_step, batch)
            for dtype in PAGES:
                where = f"{label}, pages {str(dtype)[6:]}"
                yield f"attention decode, {where}", partial(draw.attend_step, batch, dtype)
        for rows in (3, 40) if small else (3, 40, 600):
            label = f"{shapes.name}, {rows} rows"
            yield f"norms, {label}", partial(draw.norm, rows)
            for bits in (4, 6, 8):
                yield f"int{bits} weights, {label}", partial(draw.codes, rows, bits)
            if shapes.experts:
                yield f"experts, {label}", partial(draw.experts, rows)


def prefill(slices: tuple[int, ...], before: int = BLOCK) -> PrefillMeta:
    """Return sequences with a cached block each, states kept at their first chunk."""
    ends = [0]
    for tokens in slices:
        ends.append(ends[-1] + tokens)
    blocks = [-(-(before + tokens) // BLOCK) for tokens in slices]
    first = [sum(blocks[:i]) for i in range(len(blocks))]
    count = len(slices)
    return PrefillMeta(
        cu_seqlens=tuple(ends),
        starts=(before,) * count,
        block_tables=tuple(
            tuple(range(begin, begin + many)) for begin, many in zip(first, blocks, strict=True)
        ),
        src_rows=tuple(range(count)),
        dst_rows=tuple(range(count, 2 * count)),
        chunk_ends=tuple(
            (*range(begin + BLOCK, end, BLOCK), end)
            for begin, end in zip(ends, ends[1:], strict=False)
        ),
        snapshots=tuple((i, 0, 2 * count + i) for i in range(count)),
    )


def decode(batch: int, keys: int = 1000) -> DecodeMeta:
    """Return sequences of different lengths over one pool."""
    lengths = tuple(keys - 13 * i for i in range(batch))
    most = -(-keys // BLOCK)
    tables = tuple(
        tuple((i * 7 + block) % (2 * most) for block in range(-(-length // BLOCK)))
        for i, length in enumerate(lengths)
    )
    rows = tuple(range(batch))
    return DecodeMeta(tables, lengths, rows, rows, tuple(batch + i for i in rows))


class Inputs:
    """Draws the inputs of a model's kernels once for each call.

    Args:
        device: of the tensors.
        shapes: of the layers.
    """

    def __init__(self, device: str, shapes: Shapes) -> None:
        self._device, self._shapes = device, shapes

    def delta(self, slices: tuple[int, ...]) -> Case:
        meta = prefill(slices)
        state = self._state(3 * len(slices))
        inputs = self._delta_inputs(meta.num_tokens)

        def call() -> list[torch.Tensor]:
            kept = state.clone()
            return [chunk_gated_delta(*inputs, kept, meta), kept]

        return call

    def step(self, batch: int) -> Case:
        meta, state = decode(batch), self._state(2 * batch)
        inputs = self._delta_inputs(batch)

        def call() -> list[torch.Tensor]:
            kept = state.clone()
            return [recurrent_gated_delta(*inputs, kept, meta), kept]

        return call

    def verify(self, batch: int) -> Case:
        shapes, entries = self._shapes, batch * DRAFTED
        meta = VerifyMeta(
            cu_seqlens=tuple(range(0, entries + 1, DRAFTED)),
            starts=(BLOCK,) * batch,
            block_tables=((0, 1),) * batch,
            rows=tuple(range(batch)),
            updates=tuple(range(0, entries, DRAFTED)),
            folded=(DRAFTED,) * batch,
        )
        state, inputs = self._state(batch), self._delta_inputs(entries)
        dim = shapes.state_dim
        keys = torch.nn.functional.normalize(self._floats(entries, shapes.key_heads, dim), dim=-1)
        updates = Updates(
            keys,
            self._floats(entries, shapes.value_heads, dim),
            -torch.rand(entries, shapes.value_heads, device=self._device) * 0.1,
            self._half(entries, shapes.conv_channels),
        )

        def call() -> list[torch.Tensor]:
            kept = state.clone()
            fresh = Updates(*(part.clone() for part in vars(updates).values()))
            out = verify_gated_delta(*inputs, kept, fresh, meta)
            return [out, kept, fresh.keys, fresh.changes, fresh.decays]

        return call

    def conv(self, slices: tuple[int, ...]) -> Case:
        meta, (weight, tails) = prefill(slices), self._conv_parts(3 * len(slices))
        x = self._half(meta.num_tokens, self._shapes.conv_channels)

        def call() -> list[torch.Tensor]:
            kept = tails.clone()
            return [causal_conv_prefill(x, weight, kept, meta), kept]

        return call

    def conv_step(self, batch: int) -> Case:
        meta, (weight, tails) = decode(batch), self._conv_parts(2 * batch)
        x = self._half(batch, self._shapes.conv_channels)

        def call() -> list[torch.Tensor]:
            kept = tails.clone()
            return [causal_conv_decode(x, weight, kept, meta), kept]

        return call

    def attend(self, slices: tuple[int, ...], dtype: torch.dtype) -> Case:
        meta = prefill(slices)
        blocks = 1 + max(max(table) for table in meta.block_tables)
        pages = self._pages(blocks, dtype)
        q = self._half(meta.num_tokens, self._shapes.query_heads, self._shapes.head_dim)
        scale = self._shapes.head_dim**-0.5
        return lambda: [attention_prefill(q, pages, meta, scale=scale)]

    def attend_step(self, batch: int, dtype: torch.dtype) -> Case:
        meta = decode(batch)
        blocks = 1 + max(max(table) for table in meta.block_tables)
        pages = self._pages(blocks, dtype)
        q = self._half(batch, self._shapes.query_heads, self._shapes.head_dim)
        scale = self._shapes.head_dim**-0.5
        return lambda: [attention_decode(q, pages, meta, scale=scale)]

    def norm(self, rows: int) -> Case:
        shapes = self._shapes
        x, weight = self._half(rows, shapes.hidden), self._half(shapes.hidden)
        heads = self._half(rows, shapes.value_heads, shapes.state_dim)
        own = self._half(shapes.state_dim)
        return lambda: [rms_norm(x, weight, 1e-6), gated_rms_norm(heads, heads, own, 1e-6)]

    def codes(self, rows: int, bits: int) -> Case:
        depth = self._shapes.hidden
        columns = 1024  # A host quantises them.
        group = group_of(bits, depth)
        assert group is not None
        plain = torch.randn(columns, depth) * depth**-0.5
        kept = quantise(plain, bits, group)
        weight = TorchQuantised.of([kept], columns, depth, None, torch.device(self._device))
        x = self._half(rows, depth)
        return lambda: [weight(x)]

    def experts(self, tokens: int) -> Case:
        shapes = self._shapes
        logits = self._half(tokens, shapes.experts)
        x = self._half(tokens, shapes.hidden)
        gate_up = self._half(shapes.experts, 2 * shapes.expert_width, shapes.hidden) * 0.02
        down = self._half(shapes.experts, shapes.hidden, shapes.expert_width) * 0.04

        def call() -> list[torch.Tensor]:
            weights, ids = route(logits, shapes.top_k)
            return [weights, ids, routed_experts(x, weights, ids, gate_up, down)]

        return call

    def _delta_inputs(self, tokens: int) -> tuple[torch.Tensor, ...]:
        shapes, dim = self._shapes, self._shapes.state_dim
        return (
            self._half(tokens, shapes.key_heads, dim),
            self._half(tokens, shapes.key_heads, dim),
            self._half(tokens, shapes.value_heads, dim),
            -torch.rand(tokens, shapes.value_heads, device=self._device) * 0.1,
            torch.rand(tokens, shapes.value_heads, device=self._device).bfloat16(),
        )

    def _conv_parts(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        channels, taps = self._shapes.conv_channels, self._shapes.conv_taps
        return self._half(channels, taps), self._half(rows, channels, taps - 1)

    def _pages(self, blocks: int, dtype: torch.dtype) -> KVLayer:
        shape = (blocks, 2, BLOCK, self._shapes.kv_heads, self._shapes.head_dim)
        pool = torch.zeros(shape, dtype=dtype, device=self._device)
        scales = torch.zeros(blocks, 4, *shape[2:4], dtype=torch.float16, device=self._device)
        parts = [scales[:, i] if dtype == torch.uint8 else None for i in range(4)]
        kv = KVLayer(pool[:, 0], pool[:, 1], *parts)
        k, v = (self._half(blocks * BLOCK, *shape[3:]) for _ in range(2))
        write_kv(k, v, kv, torch.arange(blocks * BLOCK, device=self._device))
        return kv

    def _state(self, rows: int) -> torch.Tensor:
        dim = self._shapes.state_dim
        return self._floats(rows, self._shapes.value_heads, dim, dim) * 0.1

    def _half(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device, dtype=torch.bfloat16)

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device)
