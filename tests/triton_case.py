"""What the Triton tests share: a device, poisoned tensors, and the way into the kernels."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.interpreter import FunctionRewriter

from vlm_serve.kernels import dispatch, kv_write
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.metadata import KVLayer, PrefillMeta
from vlm_serve.kernels.triton_support import interpreted

DEVICE = torch.device("cpu" if interpreted() else "cuda")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def _transformed(
    rewriter: Any, source: str, transform: Any = FunctionRewriter._transform_ast
) -> Any:
    """Parse a kernel, again if something else was parsed meanwhile: CPython 3.11 counts the depth
    of all parses in one place, and takes what another thread or a finaliser adds for a fault."""
    for _ in range(9):
        with suppress(SystemError):
            return transform(rewriter, source)
    return transform(rewriter, source)


FunctionRewriter._transform_ast = _transformed


@contextmanager
def kernels() -> Iterator[None]:
    """Runs the public ops on their Triton kernels. Lanes beyond a tensor's end compute on garbage
    and are masked afterwards; numpy, which the interpreter computes with, would warn of them."""
    with triton_everywhere(), np.errstate(all="ignore"):
        yield


@contextmanager
def row_by_row() -> Iterator[None]:
    """Lets the interpreter multiply as GPUs do: a row's bits do not depend on the rows beside it.
    numpy's BLAS does not promise that, and breaks it on some processors."""

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return np.einsum("ij,jk->ik", a.astype(dtype), b.astype(dtype))

    with patch.object(np, "matmul", matmul):
        yield


@contextmanager
def engines_on_triton() -> Iterator[None]:
    """Let engines on a CPU take Triton kernels, on every thread. Only a GPU's pools have the layout
    of copies of blocks, so torch does these."""
    everywhere = ContextVar("on all threads", default=True)
    kv_write._copy.replace_triton(kv_write._copy.torch)
    try:
        with (
            patch.object(dispatch, "_triton_everywhere", everywhere),
            row_by_row(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        kv_write._copy.replace_triton(None)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Largest difference against the reference's own scale; NaN anywhere fails."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    assert actual.shape == expected.shape
    if expected.numel():
        scale = max(1.0, float(expected.abs().max()))
        difference = float((actual - expected).abs().max())
        assert difference <= tolerance * scale, difference


def prefill_case(
    rng: random.Random, *, sequences: int, longest: int, chunk: int, first: int | None = None
) -> tuple[PrefillMeta, int]:
    """Random slices, one of them empty and one of a single token: (meta, number of state rows).

    Chunks are cut at random places besides every `chunk` tokens; source rows are random, some zero
    state, some in place, one row read by several; snapshots lie on random chunk ends.
    """
    lengths = [0, 1, *(rng.randint(1, longest) for _ in range(sequences - 2))]
    rng.shuffle(lengths)
    if first is not None:
        lengths[0] = first
    free = list(range(4 * sequences + 2))
    rng.shuffle(free)
    shared = free.pop()
    offsets, ends, src, dst = [0], [], [], []
    snapshots: list[tuple[int, int, int]] = []
    for i, length in enumerate(lengths):
        begin = offsets[-1]
        cuts = {*range(chunk, length, chunk), *rng.sample(range(1, length + 1), min(2, length))}
        ends.append(tuple(begin + cut for cut in sorted(cuts | ({length} if length else set()))))
        offsets.append(begin + length)
        dst.append(free.pop())
        src.append(rng.choice([-1, shared, shared, dst[-1], free.pop()]))
        wanted = rng.sample(range(len(ends[-1])), min(2, len(ends[-1])))
        snapshots.extend((i, which, free.pop()) for which in wanted[: 2 if len(free) > 12 else 0])
    meta = PrefillMeta(
        cu_seqlens=tuple(offsets),
        starts=tuple(rng.randint(0, 30) for _ in lengths),
        block_tables=((),) * len(lengths),
        src_rows=tuple(src),
        dst_rows=tuple(dst),
        chunk_ends=tuple(ends),
        snapshots=tuple(snapshots),
    )
    return meta, 4 * sequences + 2


def heads_of(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[T, heads * D]`, any row stride, as a `[T, heads, D]` view."""
    dim = x.shape[1] // heads
    return x.as_strided((x.shape[0], heads, dim), (x.stride(0), dim, 1), x.storage_offset())


def on_cpu(kv: KVLayer) -> KVLayer:
    """The same pages where the references run; on the CPU the very same memory."""

    def there(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.cpu()

    scales = (kv.k_scale, kv.k_zero, kv.v_scale, kv.v_zero)
    return KVLayer(kv.k.cpu(), kv.v.cpu(), *(there(x) for x in scales))
