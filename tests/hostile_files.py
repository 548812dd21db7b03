"""Bytes and files made to do harm to whoever opens them."""

from __future__ import annotations

import base64
import io
import os
import struct
import zipfile
import zlib
from pathlib import Path

from PIL import Image

ROWS_BYTES = 78_000_000
"""Unpacked rows of a PNG bomb: far above what a picture may have, and packed within 0.2 s."""


def png_bomb(width: int, height: int) -> bytes:
    """Return a small PNG whose header announces a huge picture, with `ROWS_BYTES` of its rows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    packer = zlib.compressobj(9)
    rows = packer.compress(bytes(min(height * (1 + width * 3), ROWS_BYTES))) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", rows), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def gif_bomb() -> bytes:
    """A GIF whose screen has 65535 x 65535 pixels."""
    screen = (
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\x00\x00" + b"\x00" * 3 + b"\xff" * 3
    )
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x02\x4c\x01\x00"
    return screen + frame + b";"


def zip_bomb() -> bytes:
    """200 MB of zeros in 200 kB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(200_000_000))
    return buffer.getvalue()


def text_png(size: int) -> bytes:
    """A PNG with a compressed text chunk that unpacks to `size` bytes."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    plain = buffer.getvalue()
    data = b"zTXt" + b"Comment\x00\x00" + zlib.compress(bytes(size), 9)
    chunk = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    return plain[:33] + chunk + plain[33:]


def many_scans(count: int, width: int = 64, height: int = 64) -> bytes:
    """A progressive JPEG of so many scans: the last one comes again and again."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (9, 200, 3)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    scan, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[scan:end] * (count - data.count(b"\xff\xda")) + data[end:]


def image_of(kind: str, width: int, height: int) -> bytes:
    """A plain picture in a format of Pillow's."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, kind)
    return buffer.getvalue()


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def make_folder(folder: Path) -> Path:
    """A folder as `--allowed-local-media-path`, with things in it that must not be read, beside a
    secret picture that lies outside. Returns the root."""
    root = folder / "root"
    (root / "dir.png").mkdir(parents=True)
    (folder / "secret.png").write_bytes(image_of("PNG", 32, 32))
    (root / "link.png").symlink_to(folder / "secret.png")
    (root / "up").symlink_to(folder)
    (root / "device.png").symlink_to("/dev/zero")
    (root / "loop.png").symlink_to("loop.png")
    os.mkfifo(root / "fifo.png")
    with (root / "sparse.png").open("wb") as file:
        file.truncate(8 << 30)
    (root / "passwd.png").write_text("root:x:0:0")
    return root


SDP = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
SDP += b"a=rtpmap:96 H264/90000\n"
FFCONCAT = b"ffconcat version 1.0\nfile /etc/passwd\nfile change.mp4\n"
M3U8 = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
DASH = b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>file:///etc/'
DASH += b"passwd</BaseURL></MPD>"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n"
