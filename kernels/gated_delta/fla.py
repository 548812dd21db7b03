"""Prefill of the gated delta rule by the kernels of flash-linear-attention (the package fla-core).

Its chunks of 64 tokens count from the start of a sequence, and it writes the last state of a
sequence alone. So a chunk that is not full gets padding, with keys, write strengths and decays of
0, which leave a state as it is. A slice with snapshots is cut behind each of them, and its parts
run in calls one after the other. Tiles are pinned here: a measured choice would differ between
processes, and with it the bits.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, cast

import torch

from vlm_serve.errors import ConfigError
from vlm_serve.kernels.checks import MAX_CHUNK
from vlm_serve.kernels.gated_delta.reference import Tokens
from vlm_serve.kernels.metadata import PrefillMeta

PACKAGE, VERSION = "fla-core", "0.6.0"
MOST_DIM = 256
"""Largest dimension of keys that its kernels take."""
EPS = 1e-6
TILES: Mapping[str, tuple[Mapping[str, int], int, int]] = {
    "fla.modules.norm.l2norm:l2norm_fwd_kernel": ({"BT": 16}, 4, 3),
    "fla.ops.utils.cumsum:chunk_local_cumsum_scalar_kernel": ({}, 4, 3),
    "fla.ops.gated_delta_rule.chunk_fwd:chunk_gated_delta_rule_fwd_kkt_solve_kernel": (
        {"BK": 64},
        2,
        3,
    ),
    "fla.ops.gated_delta_rule.wy_fast:recompute_w_u_fwd_kernel": ({}, 4, 2),
    # On Hopper four warps gave wrong states with several versions of Triton, two right ones.
    "fla.ops.common.chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64": (
        {"BV": 32},
        2,
        2,
    ),
    "fla.ops.common.chunk_o:chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
}
"""Tile, warps and stages of each kernel."""


@dataclass(frozen=True)
class _Round:
    """Parts of slices that one call computes.

    Attributes:
        sequences: whose parts they are.
        offsets: int64 `[parts + 1]`, in the tokens of the call.
        chunks: int64 `[chunks, 2]`: part, and chunk within it.
        tokens, places: of each token in the step and in the call, int64; None if the call has all
            tokens of the step in their order.
        length: tokens of the call.
        rows: (part, state row) for each state to write.
    """

    sequences: tuple[int, ...]
    offsets: torch.Tensor
    chunks: torch.Tensor
    tokens: torch.Tensor | None
    places: torch.Tensor | None
    length: int
    rows: tuple[tuple[int, int], ...]


def problem() -> str:
    """Return a sentence if the package is missing or of another version, else ""."""
    try:
        installed = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed: pip install {PACKAGE}=={VERSION} einops"
    if installed != VERSION:
        return f"{PACKAGE} is {installed}; its tiles are known for {VERSION} alone"
    return ""


def chunk_gated_delta(
    tokens: Tokens, state: torch.Tensor, meta: PrefillMeta
) -> torch.Tensor | None:
    """Compute as the other implementations do.

    Return None, with nothing done, for a graph's tables, for float32 operands, and for states of 16
    bits, which must be rounded behind every chunk.
    """
    q, k, v, g, beta, skip = tokens
    known = skip is None and q.dtype != torch.float32 and state.dtype == torch.float32
    if meta.fixed or not known or q.shape[2] > MOST_DIM:
        return None
    pin_tiles()
    rounds = meta.plans.get("fla")
    if rounds is None:
        rounds = meta.plans["fla"] = _rounds(meta, q.device)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    states = _initial(state, meta)
    for batch in cast("list[_Round]", rounds):
        operands = [_packed(x, batch) for x in (q, k, v, g, beta)]
        chosen = list(batch.sequences)
        result, final = _call(operands, states[chosen], batch)
        states[chosen] = final
        if batch.tokens is None:
            out.copy_(result)
        else:
            out[batch.tokens] = result[batch.places]
        for part, row in batch.rows:
            state[row] = final[part]
    for i, ends in enumerate(meta.chunk_ends):
        if not ends:
            state[meta.dst_rows[i]] = states[i]
    return out


def _initial(state: torch.Tensor, meta: PrefillMeta) -> torch.Tensor:
    """Copy the states that slices start from, before any row is written."""
    states = state.new_zeros(len(meta), *state.shape[1:])
    warm = [i for i, row in enumerate(meta.src_rows) if row >= 0]
    if warm:
        states[warm] = state[[meta.src_rows[i] for i in warm]]
    return states


def _packed(x: torch.Tensor, batch: _Round) -> torch.Tensor:
    """Return the tokens of a call, `[1, length, ...]`, with zeros in the padding."""
    if batch.tokens is None:
        return x.contiguous().unsqueeze(0)
    packed = x.new_zeros(1, batch.length, *x.shape[1:])
    packed[0, batch.places] = x[batch.tokens]
    return packed


def _call(
    operands: list[torch.Tensor], initial: torch.Tensor, batch: _Round
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs `[length, Hv, Dv]` and the last states of the parts."""
    norm = importlib.import_module("fla.modules.norm.l2norm").l2norm_fwd
    chunk = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    q, k, v, g, beta = operands
    results = chunk.chunk_gated_delta_rule_fwd(
        q=norm(q, EPS)[0],
        k=norm(k, EPS)[0],
        v=v,
        g=g,
        beta=beta,
        scale=q.shape[-1] ** -0.5,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=batch.offsets,
        chunk_indices=batch.chunks,
    )
    return results[1][0], results[3]


def _rounds(meta: PrefillMeta, device: torch.device) -> list[_Round]:
    """Cut slices behind their snapshots; part n of every slice is in round n."""
    kept = {(i, chunk): row for i, chunk, row in meta.snapshots}
    parts: list[list[tuple[int, list[tuple[int, int]], list[int]]]] = []
    for i, ends in enumerate(meta.chunk_ends):
        begin, chunks, number = meta.cu_seqlens[i], list[tuple[int, int]](), 0
        for chunk, end in enumerate(ends):
            chunks.append((begin, end))
            begin, last = end, chunk + 1 == len(ends)
            row = kept.get((i, chunk))
            if row is None and not last:
                continue
            if number == len(parts):
                parts.append([])
            rows = [] if row is None else [row]
            parts[number].append((i, chunks, rows + [meta.dst_rows[i]] * last))
            chunks, number = [], number + 1
    return [_round(round_parts, meta.num_tokens, device) for round_parts in parts]


def _round(
    parts: list[tuple[int, list[tuple[int, int]], list[int]]], count: int, device: torch.device
) -> _Round:
    tokens, places, sizes = list[int](), list[int](), list[int]()
    first = 0
    for _, chunks, _ in parts:
        for index, (begin, end) in enumerate(chunks):
            tokens.extend(range(begin, end))
            places.extend(range(first, first + end - begin))
            # Nothing follows a part's last chunk.
            last = index + 1 == len(chunks)
            first += end - begin if last else MAX_CHUNK
        sizes.append(first - sum(sizes))
    whole = first == count and tokens == places
    chunks_of = [
        (part, at) for part, (_, chunks, _) in enumerate(parts) for at in range(len(chunks))
    ]

    def there(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return _Round(
        sequences=tuple(i for i, _, _ in parts),
        offsets=there(list(accumulate(sizes, initial=0))),
        chunks=there(chunks_of),
        tokens=None if whole else there(tokens),
        places=None if whole else there(places),
        length=first,
        rows=tuple((part, row) for part, (_, _, rows) in enumerate(parts) for row in rows),
    )


@cache
def pin_tiles() -> None:
    """Give each kernel one tile, so that none is timed and no file of earlier timings is read.

    Raises:
        ConfigError: the package is missing, or a kernel is not what it was in VERSION.
    """
    if said := problem():
        raise ConfigError(said, param="gpu_kernels")
    for target, (tile, warps, stages) in TILES.items():
        module, _, name = target.partition(":")
        kernel: Any = getattr(importlib.import_module(module), name, None)
        while kernel is not None and not hasattr(kernel, "configs"):
            kernel = getattr(kernel, "fn", None)
        if kernel is None or kernel.configs[0].kwargs.keys() != tile.keys():
            raise ConfigError(f"{PACKAGE} has no tiles of {name} as known", param="gpu_kernels")
        config = type(kernel.configs[0])(dict(tile), num_warps=warps, num_stages=stages)
        kernel.configs = [config]
        kernel.should_check_fla_cache = lambda key: False
