"""Gated delta rule, torch CPU path; `gates` is for every device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from vlm_serve.kernels.elementwise import softplus, times_sigmoid
from vlm_serve.kernels.gated_delta.chunks_cpu import (
    EPS,
    PIECE,
    Factors,
    Inputs,
    inverse_norm,
    padded_size,
    piece_factors,
)
from vlm_serve.kernels.gated_delta.tokens import Tokens
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta

# Pieces per batch of factors, times value heads: enough to keep threads busy, few enough to stay
# near the caches (16 pieces of 8 heads of 128 x 128 are about 6 MB).
WINDOW = 128


def chunk_gated_delta(tokens: Tokens, state: torch.Tensor, meta: PrefillMeta) -> torch.Tensor:
    q, k, v, g, beta = tokens
    q_scale = inverse_norm(q).mul_(q.shape[-1] ** -0.5)
    inputs = Inputs(q, k, g, beta, q_scale, inverse_norm(k))
    out = torch.empty(v.shape, dtype=v.dtype)
    scan = Scan(v, out, state)
    plan = [_pieces(meta, i) for i in range(len(meta))]
    factors = FactorWindow(
        inputs, [piece for chunks in plan for chunk in chunks for piece in chunk]
    )
    snapshots = {(sequence, chunk): row for sequence, chunk, row in meta.snapshots}
    for i, chunks in enumerate(plan):
        scan.begin(meta.src_rows[i], meta.dst_rows[i])
        for index, chunk in enumerate(chunks):
            for begin, end in chunk:
                scan.step(begin, end, *factors.next())
            scan.end_chunk(snapshots.get((i, index)))
        scan.finish(meta.dst_rows[i])
    return out


def _pieces(meta: PrefillMeta, sequence: int) -> list[list[tuple[int, int]]]:
    """Cut every chunk of a sequence into pieces: (begin, end) in the packed tokens."""
    chunks = []
    begin = meta.cu_seqlens[sequence]
    for end in meta.chunk_ends[sequence]:
        chunks.append([(at, min(at + PIECE, end)) for at in range(begin, end, PIECE)])
        begin = end
    return chunks


class FactorWindow:
    """Sequential access to the pieces' factors, made a window of pieces at a time."""

    def __init__(self, inputs: Inputs, pieces: Sequence[tuple[int, int]]) -> None:
        self._inputs = inputs
        self._pieces = pieces
        self._size = max(1, WINDOW // inputs.g.shape[1])
        self._taken = 0
        self._window: list[tuple[Factors, int]] = []

    def next(self) -> tuple[Factors, int]:
        """Return the next piece's factors: a batch and an index into it."""
        place = self._taken % self._size
        if place == 0:
            self._window = self._make(self._pieces[self._taken : self._taken + self._size])
        self._taken += 1
        return self._window[place]

    def _make(self, pieces: Sequence[tuple[int, int]]) -> list[tuple[Factors, int]]:
        sizes = [padded_size(end - begin) for begin, end in pieces]
        batches, used = {}, dict.fromkeys(sizes, 0)
        for size in used:
            same = [piece for piece, own in zip(pieces, sizes, strict=True) if own == size]
            batches[size] = piece_factors(self._inputs, same, size)
        window = []
        for size in sizes:
            window.append((batches[size], used[size]))
            used[size] += 1
        return window


class Scan:
    """The sequential part: it carries the state of one sequence at a time through its chunks.

    A float32 pool's destination row is updated in place. For another dtype a float32 copy is
    carried and rounded after every chunk. A run resumed from a stored row thus reads the same state
    as the unsplit run.
    """

    def __init__(self, v: torch.Tensor, out: torch.Tensor, state: torch.Tensor) -> None:
        self._v = v.transpose(0, 1)
        self._out = out.transpose(0, 1)
        self._state = state
        self._in_place = state.dtype == torch.float32
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.current = state.new_empty(0)

    def begin(self, src: int, dst: int) -> None:
        """Start a sequence from its source row; -1 for the zero state."""
        target = self._state[dst]
        self.current = target if self._in_place else torch.empty(target.shape)
        if src < 0:
            self.current.zero_()
        elif src != dst or not self._in_place:
            self.current.copy_(self._state[src])

    def finish(self, dst: int) -> None:
        """Store the sequence's state in its destination row."""
        if not self._in_place:
            self._state[dst].copy_(self.current)

    def step(self, begin: int, end: int, factors: Factors, index: int) -> None:
        """Advance the state over tokens begin:end and write their outputs."""
        kq, mix, growth = factors.kq[index], factors.mix[index], factors.growth[index]
        state, length, size = self.current, end - begin, mix.shape[2]
        seen, new, mixed = self._buffer(kq.shape[0], size)
        torch.bmm(kq, state, out=seen)
        if length == size:
            torch.addcmul(self._v[:, begin:end], seen[:, :size], growth, value=-1.0, out=new)
        else:
            short = seen[:, :length]
            new[:, length:].zero_()
            new[:, :length] = torch.addcmul(
                self._v[:, begin:end], short, growth[:, :length], value=-1.0
            )
        torch.bmm(mix, new, out=mixed)
        read, own = seen[:, size : size + length], mixed[:, size : size + length]
        torch.addcmul(own, read, growth[:, :length], out=self._out[:, begin:end])
        state.mul_(factors.decay[index]).baddbmm_(kq[:, :size].mT, mixed[:, :size])

    def end_chunk(self, snapshot: int | None) -> None:
        """Round the state as the pool would; store it in a snapshot row if one is requested."""
        if not self._in_place:
            self.current.copy_(self.current.to(self._state.dtype))
        if snapshot is not None:
            self._state[snapshot].copy_(self.current)

    def _buffer(self, heads: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if size not in self._buffers:
            width = self._v.shape[2]
            self._buffers[size] = (
                torch.empty(heads, 2 * size, width),
                torch.empty(heads, size, width),
                torch.empty(heads, 2 * size, width),
            )
        return self._buffers[size]


def recurrent_gated_delta(tokens: Tokens, state: torch.Tensor, meta: DecodeMeta) -> torch.Tensor:
    q, k, v, g, beta = tokens
    # With the decay factored out, k and q read the old state in one product. The output does not
    # need the new state: o = decay S^T q + (k . q) change. Each state crosses the memory bus once
    # each way.
    kq = unit_keys_and_queries(q, k, v.shape[1])
    decay, beta = g.exp().unsqueeze(-1), beta.unsqueeze(-1)
    change, strength = v * beta.float(), decay * beta
    seen = torch.empty(*v.shape[:2], 2, v.shape[2])
    from_key, from_query = seen.unbind(2)
    keys, decays = kq[:, :, 0].unsqueeze(-1), decay.unsqueeze(-1)
    for i, (src, dst) in enumerate(zip(meta.src_rows, meta.dst_rows, strict=True)):
        old, target = _read_row(state, src), state[dst]
        new = target if target.dtype == torch.float32 else torch.empty(target.shape)
        torch.bmm(kq[i], old, out=seen[i])
        own = change[i].addcmul_(from_key[i], strength[i], value=-1.0)
        torch.mul(old, decays[i], out=new).addcmul_(keys[i], own.unsqueeze(1))
        if new is not target:
            target.copy_(new)
        if meta.snapshot_rows[i] >= 0:
            state[meta.snapshot_rows[i]].copy_(target)
    overlap = kq.prod(2).sum(-1, keepdim=True)
    return change.mul_(overlap).addcmul_(from_query, decay).to(v.dtype)


def _read_row(state: torch.Tensor, row: int) -> torch.Tensor:
    """Return a row as float32, without a copy of a float32 row; zeros for row -1."""
    return torch.zeros(state.shape[1:]) if row < 0 else state[row].float()


def unit_keys_and_queries(q: torch.Tensor, k: torch.Tensor, heads: int) -> torch.Tensor:
    """Return unit keys and scaled queries per value head: float32 `[B, Hv, 2, Dk]`."""
    kq = torch.stack((k, q), dim=2).float()
    floor, factors = _norm_constants(q.shape[-1], q.device)
    length: torch.Tensor = torch.linalg.vector_norm(kq, 2, -1, True)
    kq *= torch.addcmul(floor, length, length).rsqrt_().mul_(factors)
    repeats = heads // q.shape[1]
    if repeats == 1:
        return kq
    return kq.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)


def gates(
    raw: torch.Tensor,
    neg_decay: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, heads = raw.float(), neg_decay.shape[0]
    b, a = wide[:, :heads], wide[:, heads:] + dt_bias
    if not deterministic:
        return torch.sigmoid(b), neg_decay * F.softplus(a)
    return times_sigmoid(torch.ones_like(b), b), neg_decay * softplus(a)


@cache
def _norm_constants(dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the epsilon of squared norms, and the lengths of keys and queries, `[2, 1]`."""
    lengths = torch.tensor([[1.0], [dim**-0.5]], device=device)
    return torch.tensor(EPS, device=device), lengths
