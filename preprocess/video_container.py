"""Finds the readable part of a video file in memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

_HEAD = struct.Struct(">I4s")
_LONG = struct.Struct(">Q")
_LONG_HEAD = _HEAD.size + _LONG.size
_FRAGMENT = b"moof"


class Reader:
    """A file object over bytes, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def read(self, size: int) -> bytes:
        piece = bytes(self._data[self._at : self._at + size])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = min(max(base + offset, 0), len(self._data))
        return self._at

    def tell(self) -> int:
        return self._at


def readable_part(data: memoryview) -> memoryview:
    """Return a file without the incomplete head of a last fragment.

    FFmpeg gives up on the whole of a fragmented MP4 with a cut last `moof` box. A recording in
    progress ends like that. Its last `mdat` box may be cut anywhere.
    """
    end = len(data)
    for kind, start, size in _boxes(data):
        if kind == _FRAGMENT and start + size > end:
            return data[:start]
    return data


def lacks_index(data: memoryview) -> bool:
    """Return True for an MP4 without a whole `moov` box, so that nothing can be read."""
    boxes = {kind: start + size <= len(data) for kind, start, size in _boxes(data)}
    return b"ftyp" in boxes and not boxes.get(b"moov", False)


def _boxes(data: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, size) of the top-level boxes of an MP4; nothing for other files."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, kind = _HEAD.unpack_from(data, at)
        if at == 0 and kind not in (b"ftyp", b"styp", b"moov", b"mdat", b"free", b"wide", b"skip"):
            return
        if size == 1 and at + _LONG_HEAD <= len(data):
            size = _LONG.unpack_from(data, at + _HEAD.size)[0]
        elif size == 0:
            size = len(data) - at
        if size < _HEAD.size:
            return
        yield kind, at, size
        at += size
