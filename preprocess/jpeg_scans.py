"""Counts the scans of a JPEG file from its markers, without decoding anything.

Each scan of a progressive file may touch every pixel, however few bytes the scan has.
"""

from __future__ import annotations

import re

# Inside a scan, 0xFF is followed by 0 (a sample), a restart marker or fill bytes.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_BARE = frozenset({0x01, 0xD8})
_START_OF_SCAN, _END = 0xDA, 0xD9


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
