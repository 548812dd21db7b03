"""Media that nobody would send who means well, as content parts, made from a random generator."""

from __future__ import annotations

import base64
import functools
import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from hostile_files import (
    DASH,
    FFCONCAT,
    M3U8,
    POSTSCRIPT,
    SDP,
    SVG,
    data_url,
    gif_bomb,
    png_bomb,
    text_png,
)
from hostile_values import size
from PIL import Image

CLIP = (Path(__file__).resolve().parents[1] / "examples" / "media" / "change.mp4").read_bytes()
URLS = (
    "http://127.0.0.1:9/x.png",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::1]/x.png",
    "http://2130706433/x.png",
    "file:///etc/passwd",
    "file:///dev/zero",
    "ftp://x/y",
    "//x/y",
    "",
    "javascript:alert(1)",
    "http://x\r\nHost: y/",
    "http://" + "a" * 300,
    "data:",
    "data:,",
    "data:image/png;base64",
    "data:image/png;base64," + "=" * 1000,
    "http://[::ffff:7f00:1]/x.png",
)
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK")
FORMATS = {"1": "PNG", "LA": "PNG", "P": "GIF", "RGBA": "PNG", "I;16": "PNG", "CMYK": "JPEG"}


def _png(width: int, height: int, depth: int, colour: int, channels: int) -> bytes:
    """A PNG of zeros, complete."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    packer = zlib.compressobj(1)
    row = bytes(1 + (width * depth * channels + 7) // 8)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@functools.cache
def deep_png(side: int) -> bytes:
    """16 bits per channel."""
    return _png(side, side, 16, 2, 3)


@functools.cache
def scans(count: int, side: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(buffer, "JPEG", progressive=True)
    plain = buffer.getvalue()
    last = plain[plain.rindex(b"\xff\xda") : plain.rindex(b"\xff\xd9")]
    return plain[: plain.rindex(b"\xff\xd9")] + last * count + b"\xff\xd9"


@functools.cache
def long_video(frames: int, codec: str) -> bytes:
    """Very many very small frames."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream(codec, rate=30)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame(32, 32, "yuv420p")
        for number in range(frames):
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


@functools.cache
def _large_bomb() -> bytes:
    return png_bomb(13000, 13000)


@functools.cache
def _wide_bomb() -> bytes:
    plain = _png(64, 64, 8, 2, 3)
    head = b"IHDR" + struct.pack(">IIBBBBB", 2**31 - 1, 1, 8, 2, 0, 0, 0)
    return plain[:12] + head + struct.pack(">I", zlib.crc32(head)) + plain[33:]


@functools.cache
def _long_comment() -> bytes:
    return text_png(10_000_000)


def picture(rng: random.Random) -> bytes:
    """A picture that is what it says, of any shape and mode."""
    width, height = size(rng, 4000), size(rng, 4000)
    mode = rng.choice(MODES)
    buffer = io.BytesIO()
    kind = FORMATS.get(mode) or rng.choice(("PNG", "JPEG", "WEBP", "BMP", "TIFF", "PPM"))
    Image.new("RGB" if kind == "WEBP" else mode, (width, height)).save(buffer, kind)
    return buffer.getvalue()


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut, or with some bytes that are others."""
    if rng.random() < 0.3:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.randint(1, 20)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def image_bytes(rng: random.Random) -> bytes:
    kind = rng.randrange(12)
    if kind < 4:
        return picture(rng)
    if kind < 7:
        return damaged(rng, picture(rng))
    if kind == 7:
        return scans(rng.choice((10, 200, 2000)), rng.choice((64, 500, 1500)))
    if kind == 8:
        return deep_png(rng.choice((500, 2000, 4000)))
    if kind == 9:
        return rng.choice((gif_bomb, _large_bomb, _wide_bomb))()
    if kind == 10:
        return rng.choice((SVG, POSTSCRIPT, _long_comment(), CLIP, b"", rng.randbytes(1000)))
    return b"\xff\xd8" * size(rng, 1_000_000)


def video_bytes(rng: random.Random) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return CLIP
    if kind < 4:
        return damaged(rng, CLIP)
    if kind == 4:
        return long_video(rng.choice((300, 3000, 20_000)), rng.choice(("mpeg4", "libx264")))
    return rng.choice((DASH, FFCONCAT, M3U8, SDP, SVG, gif_bomb(), b"", CLIP[:40] + bytes(1000)))


def url(rng: random.Random, data: bytes, kind: str) -> Any:
    """A URL for some bytes, mostly in the usual form."""
    form = rng.randrange(12)
    if form == 0:
        return f"data:{kind}," + "".join(f"%{byte:02x}" for byte in data[:3_000_000])
    if form == 1:
        filler = rng.choice(("%", "%41", "\n", " ", "\u00e9", "A"))
        return f"data:{kind};base64," + filler * size(rng, 4_000_000)
    if form == 2:
        return rng.choice(URLS)
    if form == 3:
        return rng.choice((None, 5, [], {}, [data_url(kind, data[:100])], {"url": "x"}))
    if form == 4:
        return data_url(kind, data)[: -rng.randint(1, 3)] + rng.choice(("", "=", "\n", "@"))
    if form == 5:
        return f"data:{kind};base64," + base64.encodebytes(data).decode()
    return data_url(kind, data)


def part(rng: random.Random) -> dict[str, Any]:
    """A content part of a chat message."""
    if rng.random() < 0.75:
        name, link = "image_url", url(rng, image_bytes(rng), "image/png")
    else:
        name, link = "video_url", url(rng, video_bytes(rng), "video/mp4")
    inner: Any = {"url": link} if rng.random() < 0.9 else link
    made: dict[str, Any] = {"type": name, name: inner}
    if rng.random() < 0.1:
        extra = rng.choice(("detail", "max_pixels", "min_pixels", "fps", "num_frames", "grid"))
        made[extra] = rng.choice((0, -1, 1, 10**9, 0.001, "high", True, [], None))
    return made
