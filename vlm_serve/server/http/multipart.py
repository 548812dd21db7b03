"""Reading forms of type multipart/form-data as they arrive, in bounded memory."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from vlm_serve.errors import InvalidRequestError

MAX_HEAD = 8 << 10
"""Most bytes of a part's headers."""
MAX_PARTS = 16
MAX_OUTSIDE = 64 << 10
"""Most bytes outside of headers and contents: before, between and behind the parts."""

_BOUNDARY = re.compile(rb"[A-Za-z0-9'()+_,./:=? -]{0,69}[A-Za-z0-9'()+_,./:=?-]")
_PLAIN_ENCODINGS = ("7bit", "8bit", "binary")

# Each malformed form would be a line of the log, and the answer says the same.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class FormPart:
    """The head of a part.

    Attributes:
        name: of the form's field.
        filename: as the client gives it; None: the part is no file.
    """

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes | None:
    """Return the boundary that a Content-Type names; None if it is no multipart form."""
    kind, parameters = parse_options_header(content_type.encode())
    boundary = parameters.get(b"boundary", b"")
    return boundary if kind == b"multipart/form-data" and _BOUNDARY.fullmatch(boundary) else None


class FormReader:
    """Splits a form into its parts.

    Args:
        boundary: see `boundary_of`.

    Attributes:
        ended: the last boundary was read.
    """

    def __init__(self, boundary: bytes) -> None:
        self.ended = False
        self._pieces: list[FormPart | bytes] = []
        self._headers: dict[str, str] = {}
        self._name = self._value = b""  # of the header that is being read
        self._head = self._outside = 0
        self._parts = -1  # the first one is ours
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_name,
                "on_header_value": self._add_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_head,
                "on_part_data": self._add_content,
                "on_end": self._end,
            },
            max_header_count=sys.maxsize,
            max_header_size=sys.maxsize,
        )
        # The parser takes nothing before the first boundary: it gets a part that holds that.
        self._parser.write(b"--" + boundary + b"\r\n\r\n\r\n")

    def feed(self, data: bytes) -> list[FormPart | bytes]:
        """Take the body's next bytes; return the heads of parts and pieces of their contents.

        Raises:
            InvalidRequestError: the form is malformed or too large outside of contents.
        """
        self._outside += len(data)
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise _malformed(str(error)) from None
        if self._outside > MAX_OUTSIDE:
            raise _malformed(f"more than {MAX_OUTSIDE} bytes are outside of its parts")
        pieces, self._pieces = self._pieces, []
        return pieces

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._headers, self._head = {}, 0

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._value += data[start:end]

    def _count_head(self, size: int) -> None:
        self._outside -= size
        self._head += size
        if self._head > MAX_HEAD:
            raise _malformed(f"the headers of a part have more than {MAX_HEAD} bytes")

    def _end_header(self) -> None:
        self._count_head(len(b":\r\n"))
        self._headers[self._name.decode().lower()] = self._value.decode("latin-1").strip()
        self._name = self._value = b""

    def _end_head(self) -> None:
        if self._parts:
            self._pieces.append(_part_of(self._headers))

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        if self._parts:
            self._outside -= end - start
            self._pieces.append(data[start:end])

    def _end(self) -> None:
        self.ended = True


def _part_of(headers: dict[str, str]) -> FormPart:
    encoding = headers.get("content-transfer-encoding", "binary").lower()
    if encoding not in _PLAIN_ENCODINGS:
        raise _malformed(f"the content transfer encoding {encoding[:32]!r} is not supported")
    kind, options = parse_options_header(headers.get("content-disposition"))
    if kind != b"form-data" or b"name" not in options:
        raise _malformed("a part has no Content-Disposition: form-data with a name")
    name, filename = options[b"name"], options.get(b"filename")
    shown = None if filename is None else filename.decode("utf-8", "replace")
    return FormPart(name.decode("utf-8", "replace"), shown)


def _malformed(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the form is malformed: {problem}", code="invalid_form")
