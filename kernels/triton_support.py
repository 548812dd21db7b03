"""Support code of the Triton kernels: target, launches, dot precision, a step's device tables."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from vlm_serve.errors import ConfigError
from vlm_serve.kernels.metadata import DecodeMeta, PrefillMeta, VerifyMeta
from vlm_serve.kernels.triton_faults import form_of, triton_version
from vlm_serve.system.private_files import (
    TemporaryFolder,
    cache_path,
    check_usable,
    make_private,
    secure_cache,
)

Tables = dict[str, torch.Tensor]

_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 101: 227, 103: 227, 110: 227}
"""Shared memory per block in KiB, by compute capability (CUDA Programming Guide, technical
specifications). Others since 8.6, consumer Blackwell (12.x) among them, have 99 KiB."""


@dataclass(frozen=True)
class Target:
    """Compilation target of a launch.

    Attributes:
        backend: "cuda", "hip" or "interpreter".
        arch: compute capability (90), gfx name ("gfx942"), or 0 for the interpreter.
    """

    backend: str
    arch: int | str

    @property
    def dot_precision(self) -> str:
        """Precision of products of float32 operands; ignored for 16-bit operands.

        Plain TF32 keeps 10 bits of an operand, which breaks the parity of float32 models. NVIDIA
        therefore uses the three-product split: about float32 accuracy on tensor cores. Elsewhere
        float32 products are native.
        """
        return "tf32x3" if self.backend == "cuda" else "ieee"

    @property
    def native_float8(self) -> bool:
        """True if hardware converts float8_e4m3fn; otherwise integer arithmetic does."""
        return self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 89

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory available to a program; on CDNA, of local data share."""
        if self.backend != "cuda" or not isinstance(self.arch, int):
            return 64 << 10
        return _SHARED_KIB.get(self.arch, 99) << 10

    @property
    def roomy(self) -> bool:
        """True if products take operands from shared memory, and there is much of it.

        So it is on Hopper and data-centre Blackwell. An A100 has 163 KiB, but its products take
        operands from registers.
        """
        return self.shared_memory >= 200 << 10


@dataclass(frozen=True)
class Launch:
    """A recorded kernel launch, with enough to compile the same specialisation ahead of time."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


_log = logging.getLogger(__name__)

_target: ContextVar[Target | None] = ContextVar("triton target", default=None)
_recording: ContextVar[list[Launch] | None] = ContextVar("triton launches", default=None)


def current_target() -> Target:
    """Return the target of launches: that of an enclosing `record_launches`, or that of the device
    that is current. Engines of one process may have unlike GPUs."""
    return _target.get() or _device_target(-1 if _interprets() else torch.cuda.current_device())


@cache
def _device_target(index: int) -> Target:
    """Return the target of a GPU; -1 is the interpreter."""
    if index < 0:
        return Target("interpreter", 0)
    if torch.version.hip is not None:
        return Target("hip", torch.cuda.get_device_properties(index).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(index)
    return Target("cuda", 10 * major + minor)


def needs_other_form(op: str, target: Target) -> bool:
    """Return True if a known fault of the installed Triton excludes an op's usual form there."""
    if target.backend != "cuda" or not isinstance(target.arch, int):
        return False
    return bool(form_of(op, target.arch, triton_version()))


def interpreted() -> bool:
    """Return True if Triton interprets kernels, as decided when Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


_interprets = cache(interpreted)
"""`interpreted` as it was at the first launch, which asks for every tile."""


def keep_private() -> None:
    """Keep Triton's compile cache where no other user can modify it.

    Compiled kernels are loaded again at the next start. They go to our cache, or for this process
    alone to a temporary folder. The first engine of a process calls this before any launch;
    processes of other ranks inherit the setting. If the user has set TRITON_CACHE_DIR or
    TRITON_HOME, nothing changes.

    Raises:
        ConfigError: there is no usable folder.
    """
    if os.environ.get("TRITON_CACHE_DIR") or os.environ.get("TRITON_HOME"):
        return
    root = cache_path()
    try:
        if root is None:
            raise FileNotFoundError("there is no home directory")
        place = str(root / "triton")
        secure_cache(root / "triton")
        make_private(root / "triton")
        check_usable(root / "triton")
    except OSError as error:
        _log.warning("Triton compiles at every start, into a temporary folder: %s", error)
        place = _temporary()
    os.environ["TRITON_CACHE_DIR"] = place


def _temporary() -> str:
    try:
        folder = TemporaryFolder("vlm-serve-triton-", for_code=True)
    except OSError as error:
        raise ConfigError(f"TRITON_CACHE_DIR must name a folder: {error}") from error
    atexit.register(folder.remove)
    return folder.path


@contextmanager
def record_launches(target: Target) -> Iterator[list[Launch]]:
    """Collect the launches that `target` would see inside the block, instead of running kernels."""
    launches: list[Launch] = []
    tokens = _target.set(target), _recording.set(launches)
    try:
        yield launches
    finally:
        _target.reset(tokens[0])
        _recording.reset(tokens[1])


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 1,
    fuse: bool = True,
) -> None:
    """Launch a kernel over a grid; do nothing for an empty grid.

    `fuse` lets the compiler contract products and sums; Triton's own default differs between
    versions. Kernels with results equal to separate operations, bit for bit, forbid it.
    """
    if 0 in grid:
        return
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fuse}
    recording = _recording.get()
    if recording is not None:
        recording.append(Launch(kernel, grid, arguments, options))
    else:
        kernel[grid](**arguments, **options)


def dot_dtype(dtype: torch.dtype) -> Any:
    """Return Triton's dtype for operands of a dot, given the tensor's dtype.

    The interpreter multiplies the bit patterns of bfloat16 operands, so it gets them as float32.
    """
    import triton.language as tl

    names = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return tl.float32 if current_target().backend == "interpreter" else names[dtype]


def power_of_two(size: int, least: int = 1) -> int:
    """Return the smallest power of two not below `size` and `least`."""
    return 1 << (max(size, least) - 1).bit_length()


def to_device(parts: dict[str, Sequence[int]], device: torch.device) -> Tables:
    """Copy host integers to int32 tables, in one transfer without waiting for the device.

    Each table starts at a multiple of 16 bytes: Triton specialises kernels on the alignment of
    their pointers, and a varying alignment would recompile them.
    """
    packed: list[int] = []
    places = {}
    for name, values in parts.items():
        places[name] = (len(packed), len(values))
        packed.extend(values)
        packed.extend([0] * (-len(packed) % 4))
    host = torch.tensor(packed, dtype=torch.int32)
    if device.type == "cuda":
        host = host.pin_memory()
    flat = host.to(device, non_blocking=True)
    return {name: flat[begin : begin + size] for name, (begin, size) in places.items()}


def once(tensors: Tables, key: str, build: Callable[[], Tables]) -> None:
    """Add `build()` to a step's tensors unless `key`, one of its names, is already there."""
    if key not in tensors:
        tensors.update(build())


def prefill_tables(meta: PrefillMeta, device: torch.device) -> Tables:
    """Return a prefill step's int32 tables, made once and kept in `meta.tensors`.

    Names: `cu_seqlens [P + 1]`, `starts`, `src_rows`, `dst_rows` `[P]`, `block_tables [P, W]`;
    `chunk_bounds [C + 1]` over all sequences' chunks in order, `chunk_sequence [C]`,
    `chunk_snapshot [C]` (state row or -1), `first_chunk [P + 1]`; `tail_stop`, `tail_row` (packed
    offset and state row of every conv tail to write, sequence by sequence, the final one last) and
    `first_tail [P + 1]`. As with `decode_tables`, a graph may supply the caller's own tensors under
    these names. They may have more chunks and sequences than the step; the extra ones are empty.
    """

    def build() -> Tables:
        return _shape_blocks(to_device(prefill_parts(meta), device), len(meta))

    once(meta.tensors, "chunk_bounds", build)
    return meta.tensors


def decode_tables(meta: DecodeMeta, device: torch.device) -> Tables:
    """Return a decode step's int32 tables, made once and kept in `meta.tensors`.

    Names: `kv_lens`, `src_rows`, `dst_rows`, `snapshot_rows` `[B]`, `block_tables [B, W]`. The
    decode ops read nothing else that changes between steps. A CUDA graph captured with the
    caller's own tensors under these names therefore replays on their current contents. Its block
    tables may be `[B / n, W]`: n consecutive tokens of a sequence share a row.
    """
    once(meta.tensors, "kv_lens", lambda: _decode_tables(meta, device))
    return meta.tensors


def verify_tables(meta: VerifyMeta, device: torch.device) -> Tables:
    """Return the int32 tables of drafted tokens, made once and kept in `meta.tensors`.

    Names: `slices [S, 5]`: state row, first update, updates to fold, first token, number of tokens;
    `entries [N]`: each token's update, -1 for none. As with `decode_tables`, a graph may supply
    the caller's own tensors. Its slices have fixed places, and a place may have fewer tokens than
    room: the others are padding without updates.
    """
    once(meta.tensors, "slices", lambda: _verify_tables(meta, device))
    return meta.tensors


def prefill_parts(meta: PrefillMeta) -> dict[str, Sequence[int]]:
    """Build the tables of `prefill_tables` on the host, flat and row by row."""
    rows = {(sequence, chunk): row for sequence, chunk, row in meta.snapshots}
    assert len(rows) == len(meta.snapshots), "a chunk's state goes to one snapshot row"
    bounds, sequences, snapshots, first_chunk = [0], [], [], [0]
    tail_stop, tail_row, first_tail = [], [], [0]
    for i, ends in enumerate(meta.chunk_ends):
        for chunk, end in enumerate(ends):
            row = rows.get((i, chunk), -1)
            bounds.append(end)
            sequences.append(i)
            snapshots.append(row)
            if row >= 0:
                tail_stop.append(end)
                tail_row.append(row)
        first_chunk.append(len(sequences))
        tail_stop.append(meta.cu_seqlens[i + 1])
        tail_row.append(meta.dst_rows[i])
        first_tail.append(len(tail_row))
    return {
        "cu_seqlens": meta.cu_seqlens,
        "starts": meta.starts,
        "src_rows": meta.src_rows,
        "dst_rows": meta.dst_rows,
        "chunk_bounds": bounds,
        "chunk_sequence": sequences,
        "chunk_snapshot": snapshots,
        "first_chunk": first_chunk,
        "tail_stop": tail_stop,
        "tail_row": tail_row,
        "first_tail": first_tail,
        "block_tables": _rectangle(meta.block_tables),
    }


def query_tiles(meta: PrefillMeta, rows: int, group: int) -> tuple[list[int], list[int]]:
    """Cut attention's query rows, `group` of them per token, into tiles of `rows`.

    Return the sequence and the first row of each tile. Long sequences' last tiles have the most
    keys, so they come first.
    """
    tiles = [
        (meta.starts[i] + row // group, i, row)
        for i in range(len(meta))
        for row in range(0, (meta.cu_seqlens[i + 1] - meta.cu_seqlens[i]) * group, rows)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    return [i for _, i, _ in tiles], [row for _, _, row in tiles]


def _decode_tables(meta: DecodeMeta, device: torch.device) -> Tables:
    parts: dict[str, Sequence[int]] = {
        "kv_lens": meta.kv_lens,
        "src_rows": meta.src_rows,
        "dst_rows": meta.dst_rows,
        "snapshot_rows": meta.snapshot_rows,
        "block_tables": _rectangle(meta.block_tables),
    }
    return _shape_blocks(to_device(parts, device), len(meta))


def _verify_tables(meta: VerifyMeta, device: torch.device) -> Tables:
    slices = [(begin, end - begin) for begin, end in pairwise(meta.cu_seqlens)]
    rows = [(*fold, *slice_row) for fold, slice_row in zip(meta.folds, slices, strict=True)]
    parts: dict[str, Sequence[int]] = {
        "slices": [value for row in rows for value in row],
        "entries": [
            entry
            for first, (_, count) in zip(meta.updates, slices, strict=True)
            for entry in range(first, first + count)
        ],
    }
    tables = to_device(parts, device)
    tables["slices"] = tables["slices"].view(len(meta), 5)
    return tables


def _rectangle(tables: Sequence[Sequence[int]]) -> list[int]:
    width = max([1, *map(len, tables)])
    return [block for table in tables for block in (*table, *[0] * (width - len(table)))]


def _shape_blocks(tables: Tables, sequences: int) -> Tables:
    flat = tables["block_tables"]
    tables["block_tables"] = flat.view(sequences, flat.shape[0] // max(sequences, 1))
    return tables
