"""Records of uploads as plain bytes, kept outside of this package.

A record is a fixed header, then the content hashes, then the times. Nothing in it is trusted
without a check: lengths follow from the header and must agree with the bytes.
"""

from __future__ import annotations

import math
import struct
from typing import Protocol

from blake3 import blake3

from vlm_serve.preprocess.keys import KEY_BYTES, tagged
from vlm_serve.preprocess.media_process import MediaRecord, Slices
from vlm_serve.preprocess.reading.conversation import Modality

_DOMAIN = b"vlm-serve upload 1"
_VERSION = 2
_HEAD = struct.Struct("<BBBHIIIHHIII")
"""version, modality, whether it is cut short, merge size, grid (t, h, w), slices (rows, columns, h,
w), number of times"""
_MODALITIES: tuple[Modality, ...] = ("image", "video")
_MOST_PATCHES = 1 << 24
"""Limit for a whole medium: far more than a prompt can hold."""


class UploadRecords(Protocol):
    """Keeps records beyond this process. Any thread may call; nothing raises."""

    def get(self, key: bytes) -> MediaRecord | None:
        """Return the record of a 32-byte key, if there is one; may block for a bounded time."""
        ...

    def put(self, key: bytes, record: MediaRecord) -> None:
        """Keep a record just made by decoding, without waiting."""
        ...

    def replace(self, key: bytes, record: MediaRecord) -> None:
        """Replace a record from `get` that decoding has disproved, without waiting."""
        ...


def upload_key(raw: bytes, path: bytes) -> bytes:
    """Return the 32-byte key of a record.

    Args:
        raw: the upload's key (`raw_key`).
        path: names the decoders (`decoding_path`).
    """
    fields = (tagged("domain", _DOMAIN), tagged("raw", raw), tagged("path", path))
    return blake3(b"".join(fields)).digest()


def pack_record(record: MediaRecord) -> bytes:
    """Encode a record as bytes."""
    slices = record.slices
    cut = (slices.rows, slices.columns, *slices.grid) if slices is not None else (0, 0, 0, 0)
    head = _HEAD.pack(
        _VERSION,
        _MODALITIES.index(record.modality),
        record.cut_short,
        record.merge_size,
        *record.grid,
        *cut,
        len(record.times),
    )
    assert all(len(each) == KEY_BYTES for each in record.hashes)
    return head + b"".join(record.hashes) + struct.pack(f"<{len(record.times)}d", *record.times)


def unpack_record(data: bytes) -> MediaRecord | None:
    """Decode a record; return None for bytes that are not a plausible record."""
    if len(data) < _HEAD.size:
        return None
    version, kind, cut_short, merge, t, h, w, rows, columns, slice_h, slice_w, num_times = (
        _HEAD.unpack_from(data)
    )
    if version != _VERSION or kind >= len(_MODALITIES) or cut_short > 1:
        return None
    modality, grid, slices = _MODALITIES[kind], (t, h, w), None
    if rows or columns or slice_h or slice_w:
        slices = Slices(rows, columns, (slice_h, slice_w))
    if not _is_plausible(modality, grid, merge, slices, num_times):
        return None
    num_hashes = t * (1 + (slices.count if slices is not None else 0))
    end = _HEAD.size + KEY_BYTES * num_hashes
    if len(data) != end + 8 * num_times:
        return None
    hashes = [data[first : first + KEY_BYTES] for first in range(_HEAD.size, end, KEY_BYTES)]
    times = struct.unpack_from(f"<{num_times}d", data, end)
    if not all(math.isfinite(time) and time >= 0 for time in times):
        return None
    return MediaRecord(modality, grid, tuple(hashes), times, merge, slices, bool(cut_short))


def _is_plausible(
    modality: Modality,
    grid: tuple[int, int, int],
    merge: int,
    slices: Slices | None,
    num_times: int,
) -> bool:
    pictures = [grid[1:]]
    patches = math.prod(grid)
    if slices is not None:
        pictures.append(slices.grid)
        patches += grid[0] * slices.count * math.prod(slices.grid)
        if not slices.count:
            return False
    whole = merge > 0 and all(
        side and side % merge == 0 for picture in pictures for side in picture
    )
    times = (0,) if modality == "image" else (0, grid[0])
    frames = grid[0] == 1 if modality == "image" else grid[0] >= 1
    return frames and num_times in times and patches <= _MOST_PATCHES and whole
