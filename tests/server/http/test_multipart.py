"""Forms are read alike however they are cut, and no form takes more memory than its pieces."""

from __future__ import annotations

import random

import httpx
import pytest

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.http.multipart import (
    MAX_HEAD,
    MAX_OUTSIDE,
    MAX_PARTS,
    FormPart,
    FormReader,
    boundary_of,
)

HEAD = b'Content-Disposition: form-data; name="a"\r\n\r\n'


def read(body: bytes, boundary: bytes = b"b", cuts: list[int] | None = None) -> list[object]:
    """The parts with their whole contents; the form must end."""
    reader, found = FormReader(boundary), list[object]()
    places = [0, *(cuts or []), len(body)]
    for start, end in zip(places, places[1:], strict=False):
        for each in reader.feed(body[start:end]):
            if isinstance(each, bytes) and isinstance(found[-1], bytes):
                found[-1] += each
            else:
                found.append(each)
    assert reader.ended
    return found


def form(*contents: bytes, head: bytes = HEAD) -> bytes:
    return b"".join(b"--b\r\n" + head + each + b"\r\n" for each in contents) + b"--b--\r\n"


def test_what_a_client_sends_is_read_in_any_pieces() -> None:
    content = b"\r\n--\r\n\r\n--almost\r\n" * 20 + bytes(range(256))
    request = httpx.Request(
        "POST",
        "http://server",
        data={"purpose": "batch", "empty": ""},
        files={"file": ('a "name"; x=1.jsonl', content)},
    )
    body, kind = request.read(), request.headers["content-type"]
    boundary = boundary_of(kind)
    assert boundary is not None
    whole = read(body, boundary)
    assert whole[:3] == [FormPart("purpose", None), b"batch", FormPart("empty", None)]
    file, found = whole[3:]
    assert isinstance(file, FormPart) and file.name == "file" and found == content
    assert file.filename in ('a "name"; x=1.jsonl', "a %22name%22; x=1.jsonl")
    rng = random.Random(7)
    for _ in range(200):
        cuts = sorted(rng.sample(range(1, len(body)), rng.randint(1, 12)))
        assert read(body, boundary, cuts) == whole
    assert read(body, boundary, list(range(1, len(body)))) == whole


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (form(b"x"), [FormPart("a", None), b"x"]),
        (b"before\r\n" + form(b"x") + b"behind", [FormPart("a", None), b"x"]),
        (form(b"\r\n"), [FormPart("a", None), b"\r\n"]),
        (form(b"--b"), [FormPart("a", None), b"--b"]),
        (b"--b  \r\n" + HEAD + b"x\r\n--b--", [FormPart("a", None), b"x"]),
        (form(b"x\r\n--bc\r\n"), [FormPart("a", None), b"x\r\n--bc\r\n"]),
        (b"--b--", []),
    ],
)
def test_forms_that_are_well_formed(body: bytes, found: list[object]) -> None:
    assert read(body) == found
    assert read(body, cuts=list(range(1, len(body)))) == found


@pytest.mark.parametrize(
    "body",
    [
        b"x" * (MAX_OUTSIDE + 10),
        form(b"x") + b"x" * (MAX_OUTSIDE + 10),
        form(*[b"x"] * (MAX_PARTS + 1)),
        b"--b\r\nx: " + b"x" * MAX_HEAD,
        b"--b" + b" " * (MAX_OUTSIDE + 10),
        b"--bc\r\n" * (MAX_OUTSIDE // 6 + 2),
        b"--b\r\n\r\nx",
        b"--b\r\n" + b"x: y\r\n" * (MAX_HEAD // 2),
        b"--b\r\nno header\r\n" + HEAD,
        form(b"x", head=b"Content-Disposition: attachment; name=a\r\n\r\n"),
        form(b"x", head=b"Content-Disposition: form-data; filename=a\r\n\r\n"),
        form(b"x", head=b"Content-Transfer-Encoding: base64\r\n" + HEAD),
    ],
)
def test_forms_that_are_malformed_or_too_large_outside(body: bytes) -> None:
    for cuts in ([], list(range(1, len(body)))):
        with pytest.raises(InvalidRequestError, match="the form is malformed"):
            read(body, cuts=cuts)


def test_a_reader_holds_no_more_than_a_delimiter_between_pieces() -> None:
    reader, given, found = FormReader(b"b"), 0, 0
    assert len(reader.feed(b"--b\r\n" + HEAD)) == 1
    for content in (b"\r\n--" * 5000, b"\r\n--bx" * 3000, b"\r" * 999, b"\r\n--b-") * 50:
        given += len(content)
        found += sum(len(each) for each in reader.feed(content) if isinstance(each, bytes))
        assert given - found < 8


@pytest.mark.parametrize("value", ['"' + ";" * 4000 + '"', ";" * 8000, '";' * 4000, '\\";' * 2600])
def test_heads_full_of_signs_are_read(value: str) -> None:
    head = f"Content-Disposition: form-data; name=a; filename={value}\r\n\r\n".encode()
    assert len(FormReader(b"b").feed(b"--b\r\n" + head + b"x")) == 2
    assert boundary_of(f"multipart/form-data; x={value * 8}; boundary=b") in (b"b", None)


@pytest.mark.parametrize(
    ("kind", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=utf-8; Boundary="a b:c"', b"a b:c"),
        ("multipart/form-data", None),
        ("multipart/form-data; boundary=", None),
        ("multipart/form-data; boundary=" + "a" * 71, None),
        ("multipart/form-data; boundary=a\u20ac", None),
        ("multipart/mixed; boundary=abc", None),
        ("application/json", None),
        ("", None),
    ],
)
def test_boundaries(kind: str, boundary: bytes | None) -> None:
    assert boundary_of(kind) == boundary
