"""Remembers the outcome of raw bytes, so that a repeated upload is neither decoded nor resized.

The key covers everything that decides the outcome: the tenant's salt, the bytes, the modality,
every effective option and the processors' fingerprint (docs/architecture.md#identity).

The decoding path names everything else that turns a file's bytes into pixels. This name is part of
the key of upload records, and of nothing else. A content hash is made from the pixels themselves,
so servers with different decoders still share cached entries.

Outside of this package, records are kept as plain bytes: a fixed header, then the content hashes,
then the times. Nothing in them is trusted without a check: lengths follow from the header and must
agree with the bytes.
"""

from __future__ import annotations

import math
import platform
import struct
from functools import cache
from importlib import import_module
from typing import Protocol

import numpy as np
import numpy.typing as npt
import PIL
import torch
from PIL import features

from vlm_serve.preprocess.identity.keys import KEY_BYTES, hasher_of
from vlm_serve.preprocess.media.images import plugins, renderer
from vlm_serve.preprocess.media.known_frames import FrameIndex
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.processing import MediaRecord, Slices
from vlm_serve.preprocess.reading.conversation import Modality
from vlm_serve.preprocess.sized_index import SizedIndex

_DOMAIN = b"vlm-serve raw media 2"
_CONTENT_DOMAIN = b"vlm-serve raw content 1"
# Memory of an entry without its hashes and times, and per hash: measured, rounded up.
_ENTRY_BYTES = 512
_HASH_BYTES = 128


_PATH_DOMAIN = b"vlm-serve decoding path 2"
_LIMITS = (
    "max_image_pixels",
    "max_image_scans",
    "max_video_pixels",
    "max_video_frames",
    "max_video_seconds",
)
"""Media beyond these limits are refused, so a server must not reuse records made under other
limits."""


_RECORD_DOMAIN = b"vlm-serve upload 1"
_VERSION = 2
_HEAD = struct.Struct("<BBBHIIIHHIII")
"""version, modality, whether it is cut short, merge size, grid (t, h, w), slices (rows, columns, h,
w), number of times"""
_MODALITIES: tuple[Modality, ...] = ("image", "video")
_MOST_PATCHES = 1 << 24
"""Limit for a whole medium: far more than a prompt can hold."""


def raw_digest(data: bytes | str | npt.NDArray[np.uint8]) -> bytes:
    """Return a name of 32 bytes for the content of an upload.

    Args:
        data: a file's bytes, the ASCII text of a data: URL, or C-contiguous uint8 frames.
    """
    if isinstance(data, np.ndarray):
        shape, raw = ",".join(map(str, data.shape)), data.reshape(-1).data
    elif isinstance(data, str):
        shape, raw = "url", memoryview(data.encode("ascii"))
    else:
        shape, raw = "file", memoryview(data)
    hasher = hasher_of(_CONTENT_DOMAIN, shape=shape)
    hasher.update(raw)
    return hasher.digest()


def raw_key(
    digest: bytes, *, cache_salt: str, modality: str, options: bytes, fingerprint: bytes
) -> bytes:
    """Return the 32-byte key of an upload.

    Args:
        digest: names its content (`raw_digest`).
        options: all effective options (`options_key`).
        fingerprint: names the processors.
    """
    return hasher_of(
        _DOMAIN,
        salt=cache_salt,
        modality=modality,
        options=options,
        processors=fingerprint,
        content=digest,
    ).digest()


class RawIndex(SizedIndex[MediaRecord]):
    """Records by raw key.

    Attributes:
        frames: what is known of the frames of video files, within as many bytes again.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, self.cost)
        self.frames = FrameIndex(max_bytes)

    @staticmethod
    def cost(record: MediaRecord) -> int:
        """Return the bytes that an entry counts for."""
        return _ENTRY_BYTES + _HASH_BYTES * len(record.hashes)

    def clear(self) -> None:
        """Remove all records, and all knowledge of frames."""
        self.frames.clear()
        super().clear()


def decoding_path(limits: MediaLimits) -> bytes:
    """Return 32 bytes that name the decoders, the resize and the limits."""
    limiting = {name: str(getattr(limits, name)) for name in _LIMITS}
    return hasher_of(_PATH_DOMAIN, **dict(sorted(libraries().items())), **limiting).digest()


@cache
def libraries() -> dict[str, str]:
    """Return the versions of everything that decodes and resizes.

    Loads FFmpeg, which otherwise only the decoding processes load.
    """
    av = import_module("av")
    codecs = {name: features.version_codec(name) for name in features.codecs}
    modules = {name: features.version_module(name) for name in ("webp", "avif")}
    extras = {name: features.version_feature(name) for name in ("libjpeg_turbo", "zlib_ng")}
    versions = {
        f"Pillow {name}": str(version) for name, version in (codecs | modules | extras).items()
    }
    versions |= {f"FFmpeg {name}": str(version) for name, version in av.library_versions.items()}
    versions |= {f"plugin {form}": package for form, package in plugins().items()}
    if (pages := renderer()) is not None:
        versions["plugin PDF"] = pages
    versions["PyAV"] = str(av.__version__)
    versions["Pillow"] = PIL.__version__
    # torch does the resize, and its result differs between processors.
    versions["torch"] = torch.__version__
    versions["torch CPU capability"] = torch.backends.cpu.get_cpu_capability()
    versions["machine"] = platform.machine()
    return versions


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
    return hasher_of(_RECORD_DOMAIN, raw=raw, path=path).digest()


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
    assert all(len(digest) == KEY_BYTES for digest in record.hashes)
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
