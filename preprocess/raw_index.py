"""Remembers the outcome of raw bytes, so that a repeated upload is neither decoded nor resized.

The key covers everything that decides the outcome: the tenant's salt, the bytes, the modality,
every effective option and the processors' fingerprint (docs/architecture.md#identity).

The decoding path names everything else that turns a file's bytes into pixels. This name is part of
the key of upload records, and of nothing else. A content hash is made from the pixels themselves,
so servers with different decoders still share cached entries.
"""

from __future__ import annotations

import platform
from functools import cache
from importlib import import_module

import numpy as np
import numpy.typing as npt
import PIL
import torch
from blake3 import blake3
from PIL import features

from vlm_serve.preprocess.keys import tagged
from vlm_serve.preprocess.known_frames import FrameIndex, SizedIndex
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.media_image import plugins
from vlm_serve.preprocess.media_process import MediaRecord
from vlm_serve.preprocess.pdf_pages import renderer

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
    hasher = blake3(tagged("domain", _CONTENT_DOMAIN) + tagged("shape", shape))
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
    fields = (
        tagged("domain", _DOMAIN),
        tagged("salt", cache_salt),
        tagged("modality", modality),
        tagged("options", options),
        tagged("processors", fingerprint),
        tagged("content", digest),
    )
    return blake3(b"".join(fields)).digest()


class RawIndex(SizedIndex[MediaRecord]):
    """Records by raw key.

    Attributes:
        frames: what is known of the frames of video files, within as many bytes again.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.frames = FrameIndex(max_bytes)

    @staticmethod
    def cost(record: MediaRecord) -> int:
        """Return the bytes that an entry counts for."""
        return _ENTRY_BYTES + _HASH_BYTES * len(record.hashes)

    def get(self, key: bytes) -> MediaRecord | None:
        """Return the record of a key and mark it as most recently used; None if there is none."""
        with self._lock:
            return self._find(key)

    def put(self, key: bytes, record: MediaRecord) -> None:
        """Store a record, unless it is larger than the whole index."""
        with self._lock:
            self._keep(key, record, self.cost(record))

    def clear(self) -> None:
        """Remove all records, and all knowledge of frames."""
        self.frames.clear()
        super().clear()


def decoding_path(limits: MediaLimits) -> bytes:
    """Return 32 bytes that name the decoders, the resize and the limits."""
    fields = [tagged("domain", _PATH_DOMAIN)]
    fields += [tagged(name, version) for name, version in sorted(libraries().items())]
    fields += [tagged(name, str(getattr(limits, name))) for name in _LIMITS]
    return blake3(b"".join(fields)).digest()


@cache
def libraries() -> dict[str, str]:
    """Return the versions of everything that decodes and resizes.

    Loads FFmpeg, which otherwise only the decoding processes load.
    """
    av = import_module("av")
    codecs = {name: features.version_codec(name) for name in features.codecs}
    modules = {name: features.version_module(name) for name in ("webp", "avif")}
    extras = {name: features.version_feature(name) for name in ("libjpeg_turbo", "zlib_ng")}
    found = {
        f"Pillow {name}": str(version) for name, version in (codecs | modules | extras).items()
    }
    found |= {f"FFmpeg {name}": str(version) for name, version in av.library_versions.items()}
    found |= {f"plugin {form}": package for form, package in plugins().items()}
    if (pages := renderer()) is not None:
        found["plugin PDF"] = pages
    found["PyAV"] = str(av.__version__)
    found["Pillow"] = PIL.__version__
    # torch does the resize, and its result differs between processors.
    found["torch"] = torch.__version__
    found["torch CPU capability"] = torch.backends.cpu.get_cpu_capability()
    found["machine"] = platform.machine()
    return found
