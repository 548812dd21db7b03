"""PDF documents: each page is a picture, wherever a client may put a file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw
import pytest
from conversation import png_url

import vlm_serve
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media import documents, images
from vlm_serve.preprocess.media.documents import Documents
from vlm_serve.preprocess.media.images import PdfPage, render_page
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.reading.reader import APIS, read_conversation

ROOT = bytes(32)
ENCRYPTED = """
%PDF-1.4
1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj
2 0 obj <</Type/Pages/Kids[3 0 R]/Count 1>> endobj
3 0 obj <</Type/Page/Parent 2 0 R/MediaBox[0 0 100 100]>> endobj
4 0 obj <</Filter/Standard/V 1/R 2/P -64/Length 40
/O <6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F6F>
/U <7575757575757575757575757575757575757575757575757575757575757575>>> endobj
trailer <</Root 1 0 R/Encrypt 4 0 R/ID[<01><01>]/Size 5>>
%%EOF
"""

EMPTY = """%PDF-1.4
1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj
2 0 obj <</Type/Pages/Kids[]/Count 0>> endobj
trailer <</Root 1 0 R/Size 3>>
%%EOF
"""


def made(*texts: str, size: tuple[int, int] = (300, 400)) -> bytes:
    """A document with a page for each text."""
    pages = []
    for text in texts:
        pages.append(PIL.Image.new("RGB", size, "white"))
        PIL.ImageDraw.Draw(pages[-1]).text((20, 20), text, fill="black")
    file = io.BytesIO()
    pages[0].save(file, "PDF", save_all=True, append_images=pages[1:])
    return file.getvalue()


def url_of(data: bytes) -> str:
    return "data:application/pdf;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def preprocessor() -> Iterator[Preprocessor]:
    demo = Path(vlm_serve.__file__).parent / "demo" / "dense"
    made = Preprocessor(demo, block_size=16, root_key=lambda salt: ROOT)
    yield made
    made.close()


def asked(api: str, *parts: dict[str, Any]) -> Any:
    message = {"role": "user", "content": [*parts]}
    body = {"model": "m", "max_tokens": 5, "input" if "responses" in api else "messages": [message]}
    return read_conversation(APIS[api], body)


def chat(data: bytes) -> Any:
    file = {"filename": "a.pdf", "file_data": url_of(data)}
    return asked("/v1/chat/completions", {"type": "file", "file": file})


def in_every_api(data: bytes) -> Iterator[Any]:
    yield chat(data)
    file = {"type": "input_file", "filename": "a.pdf", "file_data": url_of(data)}
    yield asked("/v1/responses", file)
    source = {"type": "base64", "media_type": "application/pdf"}
    source["data"] = base64.b64encode(data).decode()
    yield asked("/v1/messages", {"type": "document", "source": source, "title": "Notes"})


def hashes(prompt: Prompt) -> list[Any]:
    return [span.content_hash for span in prompt.spans]


def test_each_page_is_the_picture_of_it(preprocessor: Preprocessor) -> None:
    data, limits = made("one", "two"), MediaLimits()
    pictures = []
    for index in range(2):
        page = render_page(PdfPage(data, index).packed, limits)
        pictures.append({"type": "image_url", "image_url": {"url": png_url(page)}})
    expected = hashes(preprocessor.prepare(asked("/v1/chat/completions", *pictures)))
    assert len(set(expected)) == 2
    for conversation in in_every_api(data):
        prompt = preprocessor.prepare(conversation)
        assert hashes(prompt) == expected
        assert prompt.text is not None
        assert prompt.text.index("Page 1:") < prompt.text.index("Page 2:")
        assert len(conversation.media) == 1, "a stored conversation keeps the document"


def test_a_known_page_is_neither_counted_nor_rendered_again(preprocessor: Preprocessor) -> None:
    data = made("three")
    first = preprocessor.prepare(chat(data))
    before = preprocessor.media_counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocessor._decoders, "pages", None)
        again = preprocessor.prepare(chat(data))
    assert again.token_ids == first.token_ids and hashes(again) == hashes(first)
    counted = preprocessor.media_counts - before
    assert counted == {"index": 1}


def test_pictures_before_and_behind_keep_their_places(preprocessor: Preprocessor) -> None:
    colours: list[dict[str, Any]] = []
    for colour in ("red", "blue"):
        url = png_url(PIL.Image.new("RGB", (64, 64), colour))
        colours.append({"type": "image_url", "image_url": {"url": url}})
    document: dict[str, Any] = {"type": "file", "file": {"file_data": url_of(made("four", "five"))}}
    alone = hashes(preprocessor.prepare(asked("/v1/chat/completions", *colours)))
    inside = hashes(preprocessor.prepare(chat(made("four", "five"))))
    parts: list[dict[str, Any]] = [
        colours[0],
        document,
        {"type": "text", "text": "And this?"},
        colours[1],
    ]
    mixed = hashes(preprocessor.prepare(asked("/v1/chat/completions", *parts)))
    assert mixed == [alone[0], *inside, alone[1]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"%PDF-1.7 and no more", "the PDF document is damaged"),
        (b"<html></html>", "the PDF document is damaged"),
        (ENCRYPTED.encode(), "needs a password"),
        (EMPTY.encode(), "has no pages|is damaged"),
    ],
)
def test_what_cannot_be_opened_is_said(preprocessor: Preprocessor, data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        preprocessor.prepare(chat(data))
    assert caught.value.param == "messages[0].content[0].file.file_data"


def test_long_documents_and_those_without_a_reader_are_refused(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_PAGES", 2)
    with pytest.raises(InvalidRequestError, match="at most 2 pages, not 3"):
        preprocessor.prepare(chat(made("6", "7", "8")))
    monkeypatch.setattr(documents, "renderer", lambda: None)
    with pytest.raises(InvalidRequestError, match=r"install vlm-serve\[media\]"):
        preprocessor.prepare(chat(made("9")))


def test_pages_count_as_pictures(tmp_path: Path) -> None:
    demo = Path(vlm_serve.__file__).parent / "demo" / "dense"
    limits = MediaLimits(max_images=2)
    small = Preprocessor(demo, block_size=16, root_key=lambda salt: ROOT, limits=limits)
    try:
        assert len(small.prepare(chat(made("a", "b"))).spans) == 2
        with pytest.raises(InvalidRequestError, match="at most 2 images, this one has 3"):
            small.prepare(chat(made("a", "b", "c")))
    finally:
        small.close()


def test_large_and_tiny_pages_are_scaled() -> None:
    limits = MediaLimits()
    poster = render_page(PdfPage(made("x", size=(3000, 1500)), 0).packed, limits)
    assert poster.size == (2048, 1024) and poster.mode == "RGB"
    few = MediaLimits(max_image_pixels=10_000)
    width, height = render_page(PdfPage(made("x"), 0).packed, few).size
    assert 9_000 < width * height <= 10_000
    assert render_page(PdfPage(made("x"), 0).packed, limits).size == (600, 800)


def test_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = []

    def count(data: bytes) -> int:
        asked_for.append(data)
        return 1

    monkeypatch.setattr(documents, "_KNOWN", 2)
    found = Documents(count, 1 << 20)
    for name in (b"a", b"b", b"a", b"c", b"a", b"b"):
        found._number(name)
    assert asked_for == [b"a", b"b", b"c", b"b"]


def test_its_version_is_part_of_records() -> None:
    from vlm_serve.preprocess.media.raw_index import libraries

    assert libraries()["plugin PDF"] == images.renderer() != ""
