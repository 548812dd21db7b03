"""Prefill ops in compiled code: the same arguments and results as in `<op>_cpu`, which calls them.

The gated delta rule runs token by token there, its state in the cache. That is no more arithmetic
than chunks are, needs no triangular solve, and leaves a token's bits to its own sequence whatever
chunks its prompt is cut into.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import cast

import torch

from vlm_serve.kernels.derived import derived
from vlm_serve.kernels.metadata import KVLayer, PrefillMeta
from vlm_serve.kernels.native import call

_LANES = 16
_MOST_SHARED = 16
_DTYPES = (torch.float32, torch.bfloat16)


def _fields(kind: type, *names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names)


class _Packed(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "sequences", "threads"),
        *_fields(ctypes.c_void_p, "offsets", "src_rows", "dst_rows", "snapshot_rows"),
    )


class _Convolution(ctypes.Structure):
    _fields_ = (
        ("packed", _Packed),
        *_fields(ctypes.c_int64, "channels", "kernel", "x_stride", "tail_row_stride"),
        *_fields(ctypes.c_void_p, "x", "taps", "tails", "out"),
    )


class _Delta(ctypes.Structure):
    _fields_ = (
        ("packed", _Packed),
        *_fields(ctypes.c_int64, "key_heads", "value_heads", "key_dim", "value_dim"),
        *_fields(ctypes.c_int64, "q_stride", "q_head", "k_stride", "k_head", "v_stride", "v_head"),
        ("state_row_stride", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "q", "k", "v", "g", "beta", "states", "out"),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "sequences", "threads", "heads", "kv_heads", "head_dim"),
        *_fields(ctypes.c_int64, "q_stride", "q_head", "block_size"),
        *_fields(ctypes.c_int64, "kv_block_stride", "kv_token_stride", "kv_head_stride"),
        ("scale", ctypes.c_double),
        *_fields(ctypes.c_void_p, "offsets", "starts", "first_block", "blocks"),
        *_fields(ctypes.c_void_p, "q", "k", "v", "out"),
    )


def knows_conv(x: torch.Tensor) -> bool:
    """Whether `causal_conv_prefill` is for such inputs."""
    return x.dtype in _DTYPES and x.shape[1] % _LANES == 0


def causal_conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, meta: PrefillMeta
) -> torch.Tensor:
    taps = derived(weight, "taps in rows", lambda w: w.float().T.contiguous())
    out = torch.empty(x.shape, dtype=x.dtype)
    job = _Convolution(
        packed=_packed(meta),
        channels=x.shape[1],
        kernel=weight.shape[1],
        x_stride=x.stride(0),
        tail_row_stride=tails.stride(0),
        x=x.data_ptr(),
        taps=taps.data_ptr(),
        tails=tails.data_ptr(),
        out=out.data_ptr(),
    )
    call("vlm_causal_conv_prefill", ctypes.byref(job), ctypes.c_int64(8 * x.itemsize))
    return out


def knows_delta(q: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether `chunk_gated_delta` is for such inputs."""
    whole = q.shape[2] % _LANES == 0 and v.shape[2] % _LANES == 0
    return whole and q.dtype in _DTYPES and state.dtype == torch.float32


def chunk_gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    meta: PrefillMeta,
) -> torch.Tensor:
    out = torch.empty(v.shape, dtype=v.dtype)
    g, beta = g.contiguous(), beta.float().contiguous()
    job = _Delta(
        packed=_packed(meta),
        key_heads=q.shape[1],
        value_heads=v.shape[1],
        key_dim=q.shape[2],
        value_dim=v.shape[2],
        q_stride=q.stride(0),
        q_head=q.stride(1),
        k_stride=k.stride(0),
        k_head=k.stride(1),
        v_stride=v.stride(0),
        v_head=v.stride(1),
        state_row_stride=state.stride(0),
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        g=g.data_ptr(),
        beta=beta.data_ptr(),
        states=state.data_ptr(),
        out=out.data_ptr(),
    )
    call("vlm_chunk_gated_delta", ctypes.byref(job), ctypes.c_int64(8 * q.itemsize))
    return out


def knows_attention(q: torch.Tensor, kv: KVLayer) -> bool:
    """Whether `attention_prefill` is for such inputs."""
    shared = q.shape[1] // kv.k.shape[2]
    same = q.dtype == kv.k.dtype and kv.k.stride() == kv.v.stride()
    return same and q.dtype in _DTYPES and q.shape[2] % _LANES == 0 and shared <= _MOST_SHARED


def attention_prefill(
    q: torch.Tensor, kv: KVLayer, meta: PrefillMeta, *, scale: float
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype)
    if "compiled attention" not in meta.plans:
        first_block, blocks = array("q"), array("i")
        for table in meta.block_tables:
            first_block.append(len(blocks))
            blocks.extend(table)
        offsets, starts = array("q", meta.cu_seqlens), array("q", meta.starts)
        meta.plans["compiled attention"] = (offsets, starts, first_block, blocks)
    arrays = cast("tuple[array[int], ...]", meta.plans["compiled attention"])
    addresses = [each.buffer_info()[0] for each in arrays]
    job = _Attention(
        sequences=len(meta),
        threads=torch.get_num_threads(),
        heads=q.shape[1],
        kv_heads=kv.k.shape[2],
        head_dim=q.shape[2],
        q_stride=q.stride(0),
        q_head=q.stride(1),
        block_size=kv.k.shape[1],
        kv_block_stride=kv.k.stride(0),
        kv_token_stride=kv.k.stride(1),
        kv_head_stride=kv.k.stride(2),
        scale=scale,
        offsets=addresses[0],
        starts=addresses[1],
        first_block=addresses[2],
        blocks=addresses[3],
        q=q.data_ptr(),
        k=kv.k.data_ptr(),
        v=kv.v.data_ptr(),
        out=out.data_ptr(),
    )
    call("vlm_attention_prefill", ctypes.byref(job), ctypes.c_int64(8 * q.itemsize))
    return out


def _packed(meta: PrefillMeta) -> _Packed:
    """The step's sequences; the arrays are made once per step and stay with its metadata."""
    if "compiled" not in meta.plans:
        snapshots = array("q", [-1]) * meta.num_tokens
        for sequence, chunk, row in meta.snapshots:
            snapshots[meta.chunk_ends[sequence][chunk] - 1] = row
        rows = [array("q", values) for values in (meta.cu_seqlens, meta.src_rows, meta.dst_rows)]
        meta.plans["compiled"] = (*rows, snapshots)
    arrays = cast("tuple[array[int], ...]", meta.plans["compiled"])
    addresses = (each.buffer_info()[0] for each in arrays)
    return _Packed(len(meta), torch.get_num_threads(), *addresses)
