"""Files of every supported kind of picture, video and document, with seeded faults."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import av
import numpy as np
from PIL import Image

FRAMES, SIDE = 12, 48
_FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
_VIDEOS: dict[str, tuple[str, str, dict[str, str]]] = {
    "MP4": ("mp4", "libx264", {}),
    "fragmented MP4": ("mp4", "libx264", _FRAGMENTED),
    "MOV": ("mov", "mpeg4", {}),
    "Matroska": ("matroska", "libx264", {}),
    "WebM": ("webm", "libvpx", {}),
    "AVI": ("avi", "mpeg4", {}),
    "MPEG-TS": ("mpegts", "mpeg2video", {}),
    "MPEG-PS": ("mpeg", "mpeg1video", {}),
    "FLV": ("flv", "flv", {}),
    "WMV": ("asf", "wmv2", {}),
}
_PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "PNG": ("PNG", {}),
    "JPEG": ("JPEG", {}),
    "progressive JPEG": ("JPEG", {"progressive": True}),
    "WebP": ("WEBP", {}),
    "GIF": ("GIF", {}),
    "TIFF": ("TIFF", {}),
    "BMP": ("BMP", {}),
    "AVIF": ("AVIF", {}),
}
_ANIMATIONS = {"animated GIF": "GIF", "animated WebP": "WEBP", "animated PNG": "PNG"}
_DOCUMENT = "PDF"
KINDS = (*_VIDEOS, *_PICTURES, *_ANIMATIONS, _DOCUMENT)


@dataclass(frozen=True, slots=True)
class Mutated:
    """A damaged file, and its modality; a document's pages are images."""

    kind: str
    modality: Literal["image", "video", "document"]
    data: bytes


def mutated(seed: int) -> Mutated:
    """Make the damaged file of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    data = bytearray(whole(kind))
    for _ in range(rng.randint(1, 3)):
        data = rng.choice(_FAULTS)(data, rng)
    return Mutated(kind, _modality(kind), bytes(data))


def _modality(kind: str) -> Literal["image", "video", "document"]:
    if kind == _DOCUMENT:
        return "document"
    return "image" if kind in _PICTURES else "video"


@functools.cache
def whole(kind: str) -> bytes:
    """Make a sound file."""
    if kind in _VIDEOS:
        return _video(*_VIDEOS[kind])
    first, *others = (Image.fromarray(each) for each in _noise())
    buffer = io.BytesIO()
    if kind == _DOCUMENT:
        first.save(buffer, "PDF", save_all=True, append_images=others)
    elif kind in _ANIMATIONS:
        form = _ANIMATIONS[kind]
        first.save(buffer, form, save_all=True, append_images=others, duration=80)
    else:
        form, options = _PICTURES[kind]
        first.save(buffer, form, **options)
    return buffer.getvalue()


def _noise() -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    random_bytes = np.random.default_rng(0)
    return [random_bytes.integers(0, 256, (SIDE, SIDE, 3), np.uint8) for _ in range(FRAMES)]


def _video(container: str, codec: str, options: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=options) as output:
        stream: Any = output.add_stream(codec, rate=25)
        stream.height = stream.width = SIDE
        stream.pix_fmt = "yuv420p"
        for picture in _noise():
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def _flip(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.randint(1, 12)):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return data


def _flip_in_head(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.randint(1, 6)):
        if data:
            data[rng.randrange(min(len(data), 400))] = rng.choice((0, 1, 127, 128, 255))
    return data


def _cut(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(1, len(data) + 1)] if data else data


def _remove(data: bytearray, rng: random.Random) -> bytearray:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.randint(1, 300)]
    return data


def _repeat(data: bytearray, rng: random.Random) -> bytearray:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.randint(1, 2000)]
    data[start:start] = piece
    return data


def _append(data: bytearray, rng: random.Random) -> bytearray:
    return data + rng.randbytes(rng.randint(1, 500))


_FAULTS: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    _flip,
    _flip_in_head,
    _cut,
    _remove,
    _repeat,
    _append,
)
