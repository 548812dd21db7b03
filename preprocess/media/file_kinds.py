"""Names the kind of a file by its first bytes, for errors."""

from __future__ import annotations

import re

MP4 = "an MP4 or MOV video"
PDF = "a PDF document"
VIDEO_KINDS = (
    *(MP4, "an AVI video", "a Matroska or WebM video", "an FLV video", "an ASF or WMV file"),
    "an MPEG program stream",
)
_SEEN = 1024
"""Bytes of the beginning to look at."""
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, _LFS_POINTER, "a pointer of Git LFS; fetch the file itself"),
    (0, b"%PDF-", PDF),
    (0, b"PK\x03\x04", "a ZIP archive, or a document in one"),
    (0, b"\x1f\x8b", "compressed with gzip"),
    (0, b"Rar!", "a RAR archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"\xff\x0a", "a JPEG XL picture"),
    (0, b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL picture"),
    (0, b"\xff\xd8\xff", "a JPEG picture"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (0, b"GIF8", "a GIF picture"),
    (0, b"BM", "a BMP picture"),
    (0, b"II*\0", "a TIFF picture"),
    (0, b"MM\0*", "a TIFF picture"),
    (8, b"WEBP", "a WebP picture"),
    (8, b"WAVE", "a WAV sound"),
    (8, b"AVI ", "an AVI video"),
    (0, b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (0, b"FLV\x01", "an FLV video"),
    (0, b"0&\xb2u\x8ef\xcf\x11", "an ASF or WMV file"),
    (0, b"\0\0\x01\xba", "an MPEG program stream"),
    (0, b"OggS", "an Ogg file"),
    (0, b"ID3", "an MP3 sound"),
    (0, b"fLaC", "a FLAC sound"),
    (0, b"#EXTM3U", "a playlist, which names files elsewhere"),
    (0, b"\x7fELF", "a program"),
    (0, b"SQLite format 3\0", "an SQLite database"),
)
_BRANDS = {
    b"avif": "an AVIF picture",
    b"avis": "an AVIF picture",
    b"heic": "a HEIC picture",
    b"heix": "a HEIC picture",
    b"heim": "a HEIC picture",
    b"hevc": "a HEIC picture",
    b"mif1": "a HEIF picture",
    b"msf1": "a HEIF picture",
}
_LOGIN = re.compile(rb"(?i)\b(log ?in|sign ?in|password)\b")


def file_kind(data: bytes | memoryview) -> str | None:
    """Return the kind of a file, as it reads behind "it is"; None for unknown bytes."""
    head = bytes(data[:_SEEN])
    for at, magic, kind in _MAGIC:
        if head[at : at + len(magic)] == magic:
            return kind
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], MP4)
    return _text_kind(head)


def _text_kind(head: bytes) -> str | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    lower = text[:_SEEN].lower()
    if lower.startswith((b"<!doctype html", b"<html")):
        page = "an HTML page"
        return f"{page}, perhaps to log in" if _LOGIN.search(text) else page
    if b"<svg" in lower and lower.startswith(b"<"):
        return "an SVG drawing; send it as PNG"
    if lower.startswith(b"<?xml"):
        return "an XML document"
    if text[:1] in (b"{", b"["):
        return "a JSON text"
    try:
        plain = head.decode("utf-8", errors="strict" if len(head) < _SEEN else "ignore")
    except UnicodeDecodeError:
        return None
    printable = all(character.isprintable() or character in "\r\n\t\f" for character in plain)
    return "a text" if plain.strip() and printable else None
