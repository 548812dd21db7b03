"""data: URLs: what they stand for, what is refused, and how little memory they take."""

from __future__ import annotations

import base64
import random
import tracemalloc
import urllib.parse
from collections.abc import Callable

import pytest

from vlm_serve.errors import InvalidRequestError, MediaError
from vlm_serve.preprocess.reading import data_url
from vlm_serve.preprocess.reading.data_url import read_data_url
from vlm_serve.system.stopping import Stop, StoppedError

BODY = bytes(range(256)) * 20
TEXT = base64.b64encode(BODY).decode()
FORMS = [
    "data:image/png;base64," + TEXT,
    "DATA:;BASE64 ," + TEXT,
    "data:;base64," + TEXT.rstrip("="),
    "data:;base64," + TEXT.rstrip("=") + "====",
    "data:;base64," + base64.urlsafe_b64encode(BODY).decode(),
    "data:;base64," + base64.encodebytes(BODY).decode(),
    "data:;base64," + urllib.parse.quote(TEXT, safe=""),
    "data:;base64," + "".join(f"%{ord(character):02x}" for character in TEXT),
    "data:," + urllib.parse.quote_from_bytes(BODY),
    "data:application/octet-stream," + "".join(f"%{value:02X}" for value in BODY),
]


@pytest.mark.parametrize("piece", [1 << 20, 1000, 7, 3, 1])
@pytest.mark.parametrize("url", FORMS)
def test_all_forms_give_the_bytes(url: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_url, "_PIECE", piece)
    assert read_data_url(url, len(BODY)) == BODY
    with pytest.raises(MediaError, match="over"):
        read_data_url(url, len(BODY) - 1)


@pytest.mark.parametrize(
    "url",
    [
        "data:;base64",
        "data:;base64,a",
        "data:;base64,ab!d",
        "data:;base64,ab=d",
        "data:;base64,QUJD====QUJD",
        "data:;base64,QUJ\u00e9",
        "data:;base64,%4",
        "data:;base64,%",
        "data:;base64,%zz",
        "data:,%",
        "data:,%4",
        "data:,%%41",
        "data:,%g0",
        "data:,\u20ac",
    ],
)
@pytest.mark.parametrize("piece", [1 << 20, 4, 1])
def test_malformed_urls(url: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_url, "_PIECE", piece)
    with pytest.raises(InvalidRequestError) as caught:
        read_data_url(url, 1000, "where")
    assert caught.value.param == "where"
    assert not isinstance(caught.value, MediaError)


def test_random_bytes_come_back() -> None:
    generator = random.Random(0)
    for _ in range(300):
        data = generator.randbytes(generator.randrange(40))
        text = base64.b64encode(data).decode()
        quoted = "".join(f"%{ord(c):02x}" if generator.random() < 0.3 else c for c in text)
        assert read_data_url("data:;base64," + quoted, 100) == data
        assert read_data_url("data:," + urllib.parse.quote_from_bytes(data), 100) == data


MIB = 1 << 20


@pytest.mark.parametrize(
    ("make", "outcome"),
    [
        (lambda: "data:," + "%41" * (10 * MIB), None),
        (lambda: "data:;base64," + "%41" * (10 * MIB), None),
        (lambda: "data:;base64," + "A" * (30 * MIB), None),
        (lambda: "data:;base64," + "%" * (30 * MIB), InvalidRequestError),
        (lambda: "data:;base64," + "=" * (30 * MIB), InvalidRequestError),
        (lambda: "data:;base64," + " " * (30 * MIB), None),
    ],
    ids=["escapes", "escaped base64", "base64", "percent signs", "padding", "blanks"],
)
def test_30_mb_take_little_more_memory_than_their_bytes(
    make: Callable[[], str], outcome: type[Exception] | None
) -> None:
    url = make()
    tracemalloc.start()
    try:
        if outcome is None:
            read_data_url(url, 64 * MIB)
        else:
            with pytest.raises(outcome):
                read_data_url(url, 64 * MIB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The body once more as text, the bytes found as pieces and joined, and one piece's work.
    assert peak < 3 * len(url)


def test_decoding_ends_with_the_client() -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(StoppedError):
        read_data_url("data:;base64," + TEXT, len(BODY), stop=stop)
