"""A decode step of the benchmark checkpoint made of the ops alone, to see what is not a GEMM."""

from __future__ import annotations

import statistics
import time

import torch

from vlm_serve.kernels.causal_conv import causal_conv_decode
from vlm_serve.kernels.elementwise import softplus, times_sigmoid
from vlm_serve.kernels.gated_delta import recurrent_gated_delta
from vlm_serve.kernels.kv_write import write_kv
from vlm_serve.kernels.linear import linear, pack
from vlm_serve.kernels.metadata import DecodeMeta, KVLayer
from vlm_serve.kernels.norms import gated_rms_norm, rms_norm
from vlm_serve.kernels.paged_attention import attention_decode
from vlm_serve.kernels.rope import mrope_cos_sin, qk_norm_rope

LAYERS = 8
HIDDEN, FEED_FORWARD, VOCABULARY = 512, 1536, 8192
KEY_HEADS, VALUE_HEADS, DIM = 4, 8, 128
QUERY_HEADS, KV_HEADS, BLOCK = 8, 2, 64
QKV = (2 * KEY_HEADS + VALUE_HEADS) * DIM
ATTENTION = 2 * (QUERY_HEADS + KV_HEADS) * DIM


class DecodeStep:
    """Eight layers, every fourth with attention, on `batch` sequences of `context` tokens."""

    def __init__(self, dtype: torch.dtype, batch: int, context: int) -> None:
        self._dtype, self._batch = dtype, batch
        self._blocks = -(-context // BLOCK)
        tables = torch.randperm(batch * self._blocks).view(batch, self._blocks).tolist()
        self._meta = DecodeMeta(
            block_tables=tuple(tuple(table) for table in tables),
            kv_lens=(context,) * batch,
            src_rows=tuple(range(batch)),
            dst_rows=tuple(range(batch)),
            snapshot_rows=(-1,) * batch,
        )
        self._slots = torch.tensor([table[-1] * BLOCK + (context - 1) % BLOCK for table in tables])
        self._recurrent = torch.zeros(batch, LAYERS, VALUE_HEADS, DIM, DIM)
        self._tails = torch.zeros(batch, LAYERS, QKV, 3, dtype=dtype)
        self._pages = self._random(batch * self._blocks, LAYERS, 2, BLOCK, KV_HEADS, DIM)
        self._taps, self._norm = self._random(QKV, 4), self._random(HIDDEN)
        self._head_norm, self._rotation = self._random(DIM), torch.rand(DIM // 8)
        self._projections = [self._layer(index) for index in range(LAYERS)]
        self._vocabulary = pack(self._random(VOCABULARY, HIDDEN))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape).mul_(0.02).to(self._dtype)

    def _layer(self, index: int) -> list[torch.Tensor]:
        """Input, output, gate, up and down projections."""
        wide = ATTENTION if index % 4 == 3 else QKV + VALUE_HEADS * DIM + 2 * VALUE_HEADS
        shapes = (
            (wide, HIDDEN),
            (HIDDEN, VALUE_HEADS * DIM),
            (FEED_FORWARD, HIDDEN),
            (FEED_FORWARD, HIDDEN),
            (HIDDEN, FEED_FORWARD),
        )
        return [pack(self._random(*shape)) for shape in shapes]

    def run(self) -> torch.Tensor:
        """The whole step: `[batch, vocabulary]` logits."""
        x = self._random(self._batch, HIDDEN)
        positions = torch.full((3, self._batch), self._meta.kv_lens[0] - 1)
        cos, sin = mrope_cos_sin(positions, self._rotation, (6, 5, 5))
        for index, (into, out, gate, up, down) in enumerate(self._projections):
            mixed = linear(rms_norm(x, self._norm, 1e-6), into)
            core = (
                self._attend(index, mixed, cos, sin)
                if index % 4 == 3
                else self._recur(index, mixed)
            )
            x = linear(core, out, plus=x)
            normed = rms_norm(x, self._norm, 1e-6)
            hidden = linear(normed, up, times=linear(normed, gate, activation="silu"))
            x = linear(hidden, down, plus=x)
        return linear(rms_norm(x, self._norm, 1e-6), self._vocabulary)

    def _recur(self, index: int, mixed: torch.Tensor) -> torch.Tensor:
        heads = (self._batch, -1, DIM)
        values = VALUE_HEADS * DIM
        gates = mixed[:, QKV + values :].float()
        beta = torch.sigmoid(gates[:, :VALUE_HEADS])
        decay = -softplus(gates[:, VALUE_HEADS:])
        qkv = causal_conv_decode(mixed[:, :QKV], self._taps, self._tails[:, index], self._meta)
        widths = [KEY_HEADS * DIM, KEY_HEADS * DIM, values]
        q, k, v = (part.view(heads) for part in torch.split(qkv, widths, dim=1))
        state = self._recurrent[:, index]
        core = recurrent_gated_delta(q, k, v, decay, beta, state, self._meta)
        z = mixed[:, QKV : QKV + values].view(heads)
        return gated_rms_norm(core, z, self._head_norm, 1e-6).flatten(1)

    def _attend(
        self, index: int, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        heads = (self._batch, -1, DIM)
        widths = [QUERY_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, QUERY_HEADS * DIM]
        q, k, v, gate = torch.split(mixed, widths, dim=1)
        norm = self._head_norm
        q, k = qk_norm_rope(q.view(heads), k.view(heads), norm, norm, cos, sin, 1e-6)
        kv = KVLayer(self._pages[:, index, 0], self._pages[:, index, 1])
        write_kv(k, v.view(heads), kv, self._slots)
        out = attention_decode(q, kv, self._meta, scale=DIM**-0.5)
        return times_sigmoid(out.flatten(1), gate)

    def gemms(self) -> torch.Tensor:
        """The same projections on the same number of rows, and nothing else."""
        x, core = self._random(self._batch, HIDDEN), self._random(self._batch, VALUE_HEADS * DIM)
        hidden = self._random(self._batch, FEED_FORWARD)
        for into, out, gate, up, down in self._projections:
            linear(x, into)
            linear(core, out, plus=x)
            linear(x, up, times=linear(x, gate, activation="silu"))
            linear(hidden, down, plus=x)
        return linear(x, self._vocabulary)

    def row(self, dtype: str, rounds: int) -> str:
        """Measures the step and its GEMMs in turns and returns the row of the table."""
        times: tuple[list[float], list[float]] = ([], [])
        for round_number in range(-2, rounds):
            for which, function in enumerate((self.run, self.gemms)):
                begin = time.perf_counter()
                function()
                if round_number >= 0:
                    times[which].append(1e3 * (time.perf_counter() - begin))
        share = statistics.median(1 - gemm / all_ for all_, gemm in zip(*times, strict=True))
        best = (min(times[0]), min(times[1]))
        name = f"batch {self._batch}, context {self._meta.kv_lens[0]}, {dtype}"
        goal = "< 35 %" if self._batch == 8 else ""
        return f"| {name} | {best[0]:.2f} | {best[1]:.2f} | {share:.0%} | {goal} |"
