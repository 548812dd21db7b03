"""Reads what Pillow does not tell of a picture's file, and pictures with small faults, as other
programs do.

Each scan of a progressive JPEG file may touch every pixel, however few bytes the scan has. So scans
are counted from the markers, without decoding anything.
"""

from __future__ import annotations

import re
import struct
import zlib

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHUNK = struct.Struct(">I4s")
_CHECKSUM = struct.Struct(">I")
_MATTERS = frozenset({b"tRNS", b"acTL", b"fcTL", b"fdAT"})
"""Ancillary chunks with an effect on pixels."""
_JPEG_START, _JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
_SEARCHED = 1 << 16
"""Bytes at a JPEG file's end to search for its end marker."""
# Inside a scan, 0xFF is followed by 0 (a sample), a restart marker or fill bytes.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_BARE = frozenset({0x01, 0xD8})
_START_OF_SCAN, _END = 0xDA, 0xD9
_PADS = (bytes(64), b"\x2a\xd5" * 32)


def count_scans(data: bytes, most: int) -> int:
    """Count the scans of the first image, at most `most + 1`; 0 if it is not a JPEG file."""
    if data[:2] != b"\xff\xd8":
        return 0
    scans, at = 0, 2
    while scans <= most:
        found = _MARKER.search(data, at)
        if found is None or data[found.start() + 1] == _END:
            break
        kind, at = data[found.start() + 1], found.end()
        if kind in _BARE:
            continue
        scans += kind == _START_OF_SCAN
        at += max(2, int.from_bytes(data[at : at + 2], "big"))
    return scans


def without_broken_notes(data: bytes) -> bytes:
    """Return a PNG file without descriptive chunks of a wrong checksum.

    Other bytes come back as they are.
    """
    if not data.startswith(PNG_SIGNATURE):
        return data
    view = memoryview(data)
    kept, at, dropped = [view[: len(PNG_SIGNATURE)]], len(PNG_SIGNATURE), False
    while at + _CHUNK.size <= len(data):
        size, kind = _CHUNK.unpack_from(data, at)
        body = at + _CHUNK.size
        end = body + size + _CHECKSUM.size
        if end > len(data):
            break
        note = bool(kind[0] & 0x20) and kind not in _MATTERS
        if (
            note
            and zlib.crc32(view[at + 4 : body + size])
            != _CHECKSUM.unpack_from(data, body + size)[0]
        ):
            dropped = True
        else:
            kept.append(view[at:end])
        at = end
    return b"".join([*kept, view[at:]]) if dropped else data


def lacks_end(data: bytes) -> bool:
    """Return True for a JPEG file without a marker at its end."""
    return data.startswith(_JPEG_START) and data.rfind(_JPEG_END, max(0, len(data) - _SEARCHED)) < 0


def ended_twice(data: bytes) -> tuple[bytes, bytes]:
    """Return a JPEG file with two different ends.

    Bytes behind the last block do not change a picture. So both give the same pixels, unless blocks
    are missing.
    """
    blocks = data.rstrip(_JPEG_END[:1])  # half of the marker may be there
    first, second = (blocks + pad + _JPEG_END for pad in _PADS)
    return first, second
