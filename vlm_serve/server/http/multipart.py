"""Reading forms of type multipart/form-data as they arrive, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vlm_serve.errors import InvalidRequestError

MAX_HEAD = 8 << 10
"""Most bytes of a part's headers."""
MAX_PARTS = 16
MAX_OUTSIDE = 64 << 10
"""Most bytes before the first boundary, and behind the last one."""
_MAX_PADDING = 64

_BOUNDARY = re.compile(r"[A-Za-z0-9'()+_,./:=? -]{0,69}[A-Za-z0-9'()+_,./:=?-]")
_PARAMETER = re.compile(r';\s*([A-Za-z0-9*_-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;"\s]*)')
_PLAIN_ENCODINGS = ("7bit", "8bit", "binary")


@dataclass(frozen=True, slots=True)
class Part:
    """The head of a part.

    Attributes:
        name: of the form's field.
        filename: as the client gives it; None: the part is no file.
    """

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes | None:
    """Return the boundary that a Content-Type names; None if it is no multipart form."""
    kind, _, rest = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        return None
    for name, value in _PARAMETER.findall(";" + rest):
        if name.lower() == "boundary":
            boundary = _unquoted(value)
            return boundary.encode() if _BOUNDARY.fullmatch(boundary) else None
    return None


class FormReader:
    """Splits a form into its parts.

    Args:
        boundary: see `boundary_of`.

    Attributes:
        ended: the last boundary was read.
    """

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # the first boundary may begin the body
        self._state: Literal["before", "boundary", "head", "content", "ended"] = "before"
        self._parts = self._outside = 0

    @property
    def ended(self) -> bool:
        return self._state == "ended"

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """Take the body's next bytes; yield the heads of parts and pieces of their contents.

        Raises:
            InvalidRequestError: the form is malformed or too large outside of contents.
        """
        self._buffer += data
        going = True
        while going:
            if self._state in ("before", "content"):
                piece, going = self._until_boundary()
                if self._state == "before" or not piece:
                    self._count_outside(len(piece))
                else:
                    yield piece
                if going:
                    self._state = "boundary"
            elif self._state == "boundary":
                going = self._end_boundary()
            elif self._state == "head":
                head = self._head()
                going = head is not None
                if head is not None:
                    yield head
            else:
                self._count_outside(len(self._buffer))
                self._buffer.clear()
                going = False

    def _until_boundary(self) -> tuple[bytes, bool]:
        """Take the bytes before the next boundary; tell whether that has come."""
        at = self._buffer.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        piece = bytes(self._buffer[:end])
        del self._buffer[: end + len(self._delimiter) if at >= 0 else end]
        return piece, at >= 0

    def _end_boundary(self) -> bool:
        """Take the end of a boundary's line; return False if it has not arrived."""
        if len(self._buffer) < 2:
            return False
        if self._buffer.startswith(b"--"):
            self._state = "ended"
            return True
        end = self._buffer.find(b"\r\n")
        if len(self._buffer if end < 0 else self._buffer[:end]) > _MAX_PADDING:
            raise _malformed("a boundary goes on with other bytes")
        if end < 0:
            return False
        if self._buffer[:end].strip(b" \t"):
            raise _malformed("a boundary goes on with other bytes")
        del self._buffer[:end]  # the line break begins an empty head
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._state = "head"
        return True

    def _head(self) -> Part | None:
        """Take a part's headers; return None if they have not arrived."""
        end = self._buffer.find(b"\r\n\r\n")
        if (end if end >= 0 else len(self._buffer)) > MAX_HEAD:
            raise _malformed(f"the headers of a part have more than {MAX_HEAD} bytes")
        if end < 0:
            return None
        lines = bytes(self._buffer[:end]).decode("utf-8", "replace").split("\r\n")
        del self._buffer[: end + 4]
        self._state = "content"
        return _part_of(lines)

    def _count_outside(self, size: int) -> None:
        self._outside += size
        if self._outside > MAX_OUTSIDE:
            raise _malformed(f"more than {MAX_OUTSIDE} bytes are outside of its parts")


def _part_of(lines: list[str]) -> Part:
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    encoding = headers.get("content-transfer-encoding", "binary").lower()
    if encoding not in _PLAIN_ENCODINGS:
        raise _malformed(f"the content transfer encoding {encoding[:32]!r} is not supported")
    disposition = headers.get("content-disposition", "")
    kind, _, rest = disposition.partition(";")
    found = {name.lower(): _unquoted(value) for name, value in _PARAMETER.findall(";" + rest)}
    if kind.strip().lower() != "form-data" or "name" not in found:
        raise _malformed("a part has no Content-Disposition: form-data with a name")
    return Part(found["name"], found.get("filename"))


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value
    return re.sub(r'\\(["\\])', r"\1", value[1:-1])


def _malformed(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the form is malformed: {problem}", code="invalid_form")
