"""Remembers the outcome of raw bytes, so that a repeated upload is neither decoded nor resized.

The key covers everything that decides the outcome: the tenant's salt, the bytes, the modality,
every effective option and the processors' fingerprint (docs/architecture.md#identity).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vlm_serve.preprocess.keys import tagged
from vlm_serve.preprocess.known_frames import FrameIndex, SizedIndex
from vlm_serve.preprocess.media_process import MediaRecord

_DOMAIN = b"vlm-serve raw media 2"
_CONTENT_DOMAIN = b"vlm-serve raw content 1"
# Memory of an entry without its hashes and times, and per hash: measured, rounded up.
_ENTRY_BYTES = 512
_HASH_BYTES = 128


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
