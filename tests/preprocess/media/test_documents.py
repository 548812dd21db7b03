"""PDF documents: each page is a picture, wherever a client may put a file."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw
import pytest
from conversation import png_url
from http_files import serving

import vlm_serve
from vlm_serve.errors import InvalidRequestError, MediaFetchError
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
    with pytest.raises(InvalidRequestError, match="install pypdfium2"):
        preprocessor.prepare(chat(made("9")))


PAGELESS = """%PDF-1.4
1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj
2 0 obj <</Type/Pages/Kids[3 0 R 9 0 R]/Count 2>> endobj
3 0 obj <</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]>> endobj
trailer <</Root 1 0 R/Size 4>>
%%EOF
"""


def result_of(api: str, *parts: dict[str, Any]) -> Any:
    """A conversation with the parts in the result of a tool, and a question behind it."""
    content = [{"type": "text", "text": "Here:"}, *parts]
    question = {"role": "user", "content": "And?"}
    if api == "/v1/responses":
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c", "output": content}
        return read_conversation(APIS[api], {"model": "m", "input": [call, output, question]})
    if api == "/v1/messages":
        use: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": content}
        turns: list[Any] = [{"role": "assistant", "content": [use]}]
        turns.append({"role": "user", "content": [result]})
    else:
        function = {"name": "f", "arguments": "{}"}
        asked_for = {"id": "c", "type": "function", "function": function}
        turns = [{"role": "assistant", "tool_calls": [asked_for]}]
        turns.append({"role": "tool", "tool_call_id": "c", "content": content})
    return read_conversation(APIS[api], {"messages": [question, *turns, question]})


def files_of(data: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The document as part of each API, by the API's route."""
    file = {"filename": "a.pdf", "file_data": "data:application/pdf;base64," + data}
    yield "/v1/chat/completions", {"type": "file", "file": file}
    yield "/v1/responses", {"type": "input_file", **file}
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    yield "/v1/messages", {"type": "document", "source": source}


def place_of(api: str) -> str:
    return {
        "/v1/responses": "input[1].output[1].file_data",
        "/v1/messages": "messages[2].content[0].content[1].source.data",
    }.get(api, "messages[2].content[1].file.file_data")


def check_unread(made: Preprocessor, data: str, words: str) -> None:
    """Check that a document of a tool's result is a text, and an error in a question."""
    texts = set()
    for api, part in files_of(data):
        conversation = result_of(api, part)
        prompt = made.prepare(conversation)
        assert prompt.text is not None and not prompt.spans
        said = prompt.text[prompt.text.index("This document cannot") :].partition(".")[0]
        assert words in said and "[" not in said
        texts.add(said)
        assert conversation.ignored == [place_of(api)]
        again = made.prepare(conversation)
        assert again.token_ids == prompt.token_ids and len(conversation.ignored) == 1
        with pytest.raises(InvalidRequestError, match=words):
            made.prepare(asked(api, part))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"%PDF-1.7 and no more", "is damaged"),
        (ENCRYPTED.encode(), "needs a password"),
        (EMPTY.encode(), "PDF document"),
        (PAGELESS.encode(), "is damaged"),
    ],
)
def test_in_a_tools_result_a_text_takes_its_place(
    preprocessor: Preprocessor, data: bytes, words: str
) -> None:
    check_unread(preprocessor, base64.b64encode(data).decode(), words)


def test_so_do_base64_types_and_lengths_that_cannot_be_read(
    preprocessor: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_unread(preprocessor, "%%%", "not valid base64")
    monkeypatch.setattr(documents, "MAX_PAGES", 2)
    whole = base64.b64encode(made("x", "y", "z")).decode()
    check_unread(preprocessor, whole, "at most 2 pages, not 3")
    monkeypatch.setattr(documents, "renderer", lambda: None)
    check_unread(preprocessor, whole, "install pypdfium2")
    block = {"type": "document", "title": "A sheet"}
    for source, words in (
        ({"type": "base64", "media_type": "application/zip", "data": "UEsDBA=="}, "zip"),
        ({"type": "base64", "media_type": "text/plain", "data": "//79"}, "UTF-8"),
        ({"type": "content", "content": [PICTURE, {"type": "hologram"}]}, "hologram"),
    ):
        conversation = result_of("/v1/messages", block | {"source": source}, PICTURE)
        prompt = preprocessor.prepare(conversation)
        assert prompt.text is not None and words in prompt.text and len(prompt.spans) == 1
        assert conversation.ignored == ["messages[2].content[0].content[1]"]
        with pytest.raises(InvalidRequestError):
            preprocessor.prepare(asked("/v1/messages", block | {"source": source}))
    part = {"filename": "a.zip", "file_data": "UEsDBA=="}
    for api, given in (
        ("/v1/chat/completions", {"type": "file", "file": part}),
        ("/v1/responses", {"type": "input_file", **part}),
    ):
        conversation = result_of(api, given)
        prompt = preprocessor.prepare(conversation)
        assert prompt.text is not None and "This document cannot" in prompt.text
        assert len(conversation.ignored) == 1


PICTURE = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": png_url(PIL.Image.new("RGB", (64, 64), "red")).partition(",")[2],
    },
}


def test_readable_ones_are_shown_in_a_tools_result_too(preprocessor: Preprocessor) -> None:
    data = made("left", "right")
    expected = hashes(preprocessor.prepare(chat(data)))
    for api, part in files_of(base64.b64encode(data).decode()):
        conversation = result_of(api, part)
        prompt = preprocessor.prepare(conversation)
        assert hashes(prompt) == expected and not conversation.ignored


def test_a_model_without_pictures_goes_on_with_a_tools_result(tmp_path: Path) -> None:
    demo = Path(vlm_serve.__file__).parent / "demo" / "dense"
    limits = MediaLimits(max_images=1)
    small = Preprocessor(demo, block_size=16, root_key=lambda salt: ROOT, limits=limits)
    try:
        two = base64.b64encode(made("a", "b")).decode()
        check_unread(small, two, "at most 1 images, this one has 2")
        assert len(small.prepare(result_of("/v1/messages", PICTURE)).spans) == 1
        both = [*(part for api, part in files_of(two) if api == "/v1/messages"), PICTURE]
        assert len(small.prepare(result_of("/v1/messages", *both)).spans) == 1
    finally:
        small.close()


@contextlib.contextmanager
def at_urls(preprocessor: Preprocessor) -> Iterator[tuple[str, Preprocessor]]:
    """A server of files, and a preprocessor that may fetch from it."""
    files = {
        "/a.pdf": made("near", "far"),
        "/notes.txt": "Zwölf.".encode(),
        "/picture": PIL_PNG,
    }

    def handle(request: Any) -> None:
        body = files.get(request.path)
        request.send_response(404 if body is None else 200)
        request.send_header("Content-Length", str(len(body or b"")))
        request.end_headers()
        request.wfile.write(body or b"")

    demo = Path(vlm_serve.__file__).parent / "demo" / "dense"
    limits = MediaLimits(allow_private_networks=True)
    made_for = Preprocessor(demo, block_size=16, root_key=lambda salt: ROOT, limits=limits)
    with serving(handle) as url, contextlib.closing(made_for) as other:
        yield url, other


PIL_PNG = base64.b64decode(PICTURE["source"]["data"])  # type: ignore[index]


def urls_of(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "/v1/chat/completions", {"type": "file", "file": {"file_url": url}}
    yield "/v1/responses", {"type": "input_file", "file_url": url}
    yield "/v1/messages", {"type": "document", "source": {"type": "url", "url": url}}


def test_documents_are_fetched_by_the_rules_of_pictures(preprocessor: Preprocessor) -> None:
    expected = hashes(preprocessor.prepare(chat(made("near", "far"))))
    with at_urls(preprocessor) as (root, fetching):
        for api, part in urls_of(f"{root}/a.pdf"):
            assert hashes(fetching.prepare(asked(api, part))) == expected
            assert hashes(fetching.prepare(result_of(api, part))) == expected
            with pytest.raises(MediaFetchError, match="not on the public network"):
                preprocessor.prepare(asked(api, part))
            conversation = result_of(api, part)
            prompt = preprocessor.prepare(conversation)
            assert prompt.text is not None and "not on the public network" in prompt.text
            assert len(conversation.ignored) == 1
        for api, part in urls_of(f"{root}/notes.txt"):
            prompt = fetching.prepare(asked(api, part))
            assert prompt.text is not None and "Zwölf." in prompt.text
        for api, part in urls_of(f"{root}/picture"):
            with pytest.raises(InvalidRequestError, match="it is a PNG picture") as caught:
                fetching.prepare(asked(api, part))
            assert str(caught.value.param).endswith("url")
        for _, part in urls_of(f"{root}/none"):
            if part["type"] == "document":
                with pytest.raises(MediaFetchError, match="status 404"):
                    fetching.prepare(asked("/v1/messages", part))
    data_url = url_of(made("near", "far"))
    for api, part in urls_of(data_url):
        assert hashes(preprocessor.prepare(asked(api, part))) == expected


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
    found = Documents(count, lambda media: None)
    for name in (b"a", b"b", b"a", b"c", b"a", b"b"):
        found._number(name)
    assert asked_for == [b"a", b"b", b"c", b"b"]


def test_its_version_is_part_of_records() -> None:
    from vlm_serve.preprocess.media.raw_index import libraries

    assert libraries()["plugin PDF"] == images.renderer() != ""
