"""Decodes data: URLs piece by piece.

Peak memory stays close to the size of the decoded bytes, and other threads can run between two
pieces.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator

import numpy as np

from vlm_serve.errors import InvalidRequestError, MediaError
from vlm_serve.system.stopping import Stop

_PIECE = 1 << 20
_MAX_PADDING = 1 << 10
_BLANKS = b" \t\r\n\f\v"
_FROM_URL_ALPHABET = bytes.maketrans(b"-_", b"+/")
_NO_DIGIT = 0xFF
_DIGITS = np.full(256, _NO_DIGIT, dtype=np.uint8)
for _value, _characters in enumerate((*"0123456789", "aA", "bB", "cC", "dD", "eE", "fF")):
    for _character in _characters:
        _DIGITS[ord(_character)] = _value


def read_data_url(
    url: str, max_bytes: int, param: str | None = None, stop: Stop | None = None
) -> bytes:
    """Decode the bytes of a data: URL.

    Base64 may use either alphabet, contain line breaks, be percent-encoded and lack its padding.

    Raises InvalidRequestError for a malformed URL, MediaError for more than `max_bytes`.
    """
    too_large = MediaError(f"the medium is over {max_bytes} bytes", param=param)
    header, comma, body = url.partition(",")
    if not comma:
        raise InvalidRequestError("the data: URL has no comma", param=param)
    is_base64 = header.lower().rstrip().endswith(";base64")
    if len(body) - 2 * body.count("%") > (2 * max_bytes + 1024 if is_base64 else max_bytes):
        raise too_large
    kind = "base64" if is_base64 else "percent-encoded text"
    chunks, size = [], 0
    try:
        pieces = _plain_pieces(body)
        for piece in _decoded(pieces) if is_base64 else pieces:
            if stop is not None:
                stop.check()
            chunks.append(piece)
            size += len(piece)
            if size > max_bytes:
                raise too_large
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidRequestError(f"the data: URL is not valid {kind}", param=param) from None
    return b"".join(chunks)


def _plain_pieces(text: str) -> Iterator[bytes]:
    """Yield the text with percent-encoding resolved. Raises binascii.Error, UnicodeEncodeError."""
    start = 0
    while start < len(text):
        end = start + _PIECE
        split = text.find("%", max(start, end - 2), end)
        if split >= 0:
            end = split + 3
        yield _unescaped(text[start:end].encode("ascii"))
        start = end


def _unescaped(text: bytes) -> bytes:
    if b"%" not in text:
        return text
    codes = np.frombuffer(text, dtype=np.uint8)
    at = np.flatnonzero(codes == ord("%"))
    if at[-1] + 2 >= len(codes):
        raise binascii.Error("an escape is cut short")
    high, low = _DIGITS[codes[at + 1]], _DIGITS[codes[at + 2]]
    if (np.maximum(high, low) == _NO_DIGIT).any():
        raise binascii.Error("an escape is not hexadecimal")
    plain, keep = codes.copy(), np.ones(len(codes), dtype=bool)
    plain[at] = high << 4 | low
    keep[at + 1] = keep[at + 2] = False
    return plain[keep].tobytes()


def _decoded(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Decode pieces of base64. Raises binascii.Error."""
    rest = b""
    for piece in pieces:
        rest += piece.translate(_FROM_URL_ALPHABET, _BLANKS)
        whole = len(rest.rstrip(b"=")) // 4 * 4
        yield binascii.a2b_base64(rest[:whole], strict_mode=True)
        rest = rest[whole:]
        if len(rest) > _MAX_PADDING:
            raise binascii.Error("too much padding")
    rest = rest.rstrip(b"=")
    yield binascii.a2b_base64(rest + b"=" * (-len(rest) % 4), strict_mode=True)
