"""Host-side validation of kernel arguments, before any launch.

A failed check raises an error that names the argument. Checks read metadata only (shapes, strides,
dtypes, host tuples), never a tensor's values, so they cost no device synchronisation. Checks of a
step's metadata run once per step and are remembered in `meta.checked`; every later layer pays one
set lookup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from vlm_serve.kernels.metadata import AnyMeta, DecodeMeta, KVLayer, PrefillMeta, VerifyMeta

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_CHUNK = 64


class KernelArgumentError(ValueError):
    """A kernel was called with an unsupported argument.

    Attributes:
        argument: the name of the offending argument.
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Check shape (None: any size), dtype, device and a dense last dimension.

    Raises:
        KernelArgumentError: naming the argument and what was expected.
    """
    # On the hot path: a decode step at batch 1 makes some hundred of these calls.
    have = tensor.shape
    if len(have) != len(shape):
        raise _shape_error(name, tensor, shape)
    for size, want in zip(have, shape, strict=True):
        if size != want and want is not None:
            raise _shape_error(name, tensor, shape)
    if tensor.dtype not in dtypes:
        expected = ", ".join(str(dtype) for dtype in dtypes)
        raise KernelArgumentError(name, f"dtype {tensor.dtype}, expected one of {expected}")
    if tensor.device != device:
        raise KernelArgumentError(name, f"on {tensor.device}, expected {device}")
    if have and have[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelArgumentError(
            name, f"last dimension has stride {tensor.stride(-1)}, expected 1"
        )


def _shape_error(
    name: str, tensor: torch.Tensor, shape: Sequence[int | None]
) -> KernelArgumentError:
    want = ["*" if size is None else size for size in shape]
    return KernelArgumentError(name, f"shape {list(tensor.shape)}, expected {want}")


def check_meta(meta: AnyMeta, num_tokens: int, num_rows: int, num_updates: int = 0) -> None:
    """Check the offsets, chunks, state rows and updates of one kind of tokens.

    Args:
        meta: of decode tokens, prefill slices or drafts.
        num_tokens: tokens of the kind.
        num_rows: size of the pool of state rows; 0: there is none.
        num_updates: size of the pool of updates.

    Raises:
        KernelArgumentError: naming the field.
    """
    key = (type(meta).__name__, num_tokens, num_rows)
    if key in meta.checked:
        return
    if isinstance(meta, PrefillMeta):
        _check_prefill(meta, num_tokens, num_rows)
    elif isinstance(meta, DecodeMeta):
        _check_decode(meta, num_tokens, num_rows)
    else:
        _check_verify(meta, num_tokens, num_rows, num_updates)
    meta.checked.add(key)


def _check_prefill(meta: PrefillMeta, num_tokens: int, num_rows: int) -> None:
    _check_offsets(meta, num_tokens)
    _check_lengths(meta, len(meta), "starts", "src_rows", "dst_rows", "chunk_ends")
    for i, ends in enumerate(meta.chunk_ends):
        _check_chunks(ends, meta.cu_seqlens[i], meta.cu_seqlens[i + 1])
    for sequence, chunk, _ in meta.snapshots:
        if not 0 <= sequence < len(meta) or not 0 <= chunk < len(meta.chunk_ends[sequence]):
            raise KernelArgumentError("meta.snapshots", f"no chunk {chunk} of sequence {sequence}")
    if len({place[:2] for place in meta.snapshots}) != len(meta.snapshots):
        raise KernelArgumentError("meta.snapshots", "a chunk's state goes to one row")
    if num_rows:
        _check_rows(meta.src_rows, meta.dst_rows, [row for _, _, row in meta.snapshots], num_rows)


def _check_decode(meta: DecodeMeta, num_tokens: int, num_rows: int) -> None:
    _check_lengths(meta, num_tokens, "src_rows", "dst_rows", "snapshot_rows")
    if num_rows:
        snapshots = [row for row in meta.snapshot_rows if row != -1]
        _check_rows(meta.src_rows, meta.dst_rows, snapshots, num_rows)


def _check_verify(meta: VerifyMeta, num_tokens: int, num_rows: int, num_updates: int) -> None:
    _check_offsets(meta, num_tokens)
    _check_lengths(meta, len(meta), "starts", "rows", "updates", "folded")
    if num_rows:
        check_folds(meta.folds, num_rows, num_updates)
        lengths = [end - begin for begin, end in pairwise(meta.cu_seqlens)]
        _check_apart("meta.updates", zip(meta.updates, lengths, strict=True), num_updates)


def _check_lengths(meta: AnyMeta, count: int, *names: str) -> None:
    for name in names:
        if len(getattr(meta, name)) != count:
            raise KernelArgumentError(f"meta.{name}", f"expected {count} sequences")


def check_folds(folds: Sequence[tuple[int, int, int]], num_rows: int, num_updates: int) -> None:
    """Check (row, first update, count) triples: each row appears once, and no two share an update.

    Raises:
        KernelArgumentError: naming the problem.
    """
    rows = [row for row, _, _ in folds]
    if any(not 0 <= row < num_rows for row in rows):
        raise KernelArgumentError("folds", f"row outside 0..{num_rows - 1}")
    if len(set(rows)) != len(rows):
        raise KernelArgumentError("folds", "a row is written twice")
    _check_apart("folds", [(first, count) for _, first, count in folds], num_updates)


def _check_apart(name: str, ranges: Iterable[tuple[int, int]], limit: int) -> None:
    end = 0
    for first, count in sorted(ranges):
        if first < end or count < 0 or first + count > limit:
            raise KernelArgumentError(name, f"updates {first} and {count - 1} more of {limit}")
        end = first + count


def check_block_tables(
    meta: AnyMeta,
    kv_lens: Sequence[int],
    num_blocks: int,
    block_size: int,
) -> None:
    """Check that every sequence's table covers its keys and names existing blocks.

    Raises:
        KernelArgumentError: naming the field.
    """
    key = ("blocks", num_blocks, block_size)
    if key in meta.checked:
        return
    if len(meta.block_tables) != len(kv_lens):
        raise KernelArgumentError("meta.block_tables", f"expected {len(kv_lens)} sequences")
    whole = meta.table if isinstance(meta, DecodeMeta) else None
    if whole is not None and not 0 <= whole.min() <= whole.max() < num_blocks:
        raise KernelArgumentError("meta.block_tables", f"block outside 0..{num_blocks - 1}")
    for table, length in zip(meta.block_tables, kv_lens, strict=True):
        if length > len(table) * block_size:
            raise KernelArgumentError(
                "meta.block_tables", f"{len(table)} blocks of {block_size} for {length} keys"
            )
        known = whole is not None or not table
        if not known and not 0 <= min(table) <= max(table) < num_blocks:
            raise KernelArgumentError("meta.block_tables", f"block outside 0..{num_blocks - 1}")
    meta.checked.add(key)


def check_kv_layer(kv: KVLayer, device: torch.device) -> None:
    """Check shapes, dtypes and scales of one layer's pages.

    Raises:
        KernelArgumentError: naming the field.
    """
    quantised = kv.k.dtype == torch.uint8
    allowed = (*FLOAT_DTYPES, torch.float8_e4m3fn, torch.uint8)
    check_tensor("kv.k", kv.k, (None, None, None, None), allowed, device)
    check_tensor("kv.v", kv.v, kv.k.shape, (kv.k.dtype,), device)
    for name in ("k_scale", "k_zero", "v_scale", "v_zero"):
        scale = getattr(kv, name)
        if quantised != (scale is not None):
            raise KernelArgumentError(
                f"kv.{name}", "required for int8 pages" if quantised else "only for int8 pages"
            )
        if scale is not None:
            check_tensor(f"kv.{name}", scale, kv.k.shape[:3], (torch.float16,), device)


def _check_offsets(meta: PrefillMeta | VerifyMeta, num_tokens: int) -> None:
    offsets = meta.cu_seqlens
    if len(offsets) != len(meta) + 1 or offsets[0] != 0 or offsets[-1] != num_tokens:
        raise KernelArgumentError(
            "meta.cu_seqlens", f"must run from 0 to {num_tokens} in {len(meta) + 1} offsets"
        )
    if any(left > right for left, right in zip(offsets, offsets[1:], strict=False)):
        raise KernelArgumentError("meta.cu_seqlens", "must not decrease")


def _check_chunks(ends: tuple[int, ...], start: int, stop: int) -> None:
    previous = start
    for end in ends:
        if not 0 < end - previous <= MAX_CHUNK:
            raise KernelArgumentError(
                "meta.chunk_ends", f"chunk of {end - previous} tokens, expected 1..{MAX_CHUNK}"
            )
        previous = end
    if previous != stop:
        raise KernelArgumentError("meta.chunk_ends", f"chunks end at {previous}, slice at {stop}")


def _check_rows(
    src: Sequence[int], dst: Sequence[int], snapshots: Sequence[int], num_rows: int
) -> None:
    if any(not -1 <= row < num_rows for row in src):
        raise KernelArgumentError("meta.src_rows", f"row outside -1..{num_rows - 1}")
    for name, rows in (("dst_rows", dst), ("snapshots", snapshots)):
        if any(not 0 <= row < num_rows for row in rows):
            raise KernelArgumentError(f"meta.{name}", f"row outside 0..{num_rows - 1}")
    if len(set(dst)) != len(dst):
        raise KernelArgumentError("meta.dst_rows", "a row is written by two sequences")
    written = set(dst) | set(snapshots)
    if len(written) != len(dst) + len(snapshots):
        raise KernelArgumentError("meta.snapshots", "a row is written twice")
    for i, row in enumerate(src):
        # A sequence may update its own row in place; no other sequence may read that row.
        if row in written and not (row == dst[i] and src.count(row) == 1):
            raise KernelArgumentError("meta.src_rows", f"row {row} is read and written")
