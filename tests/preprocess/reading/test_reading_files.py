"""Files in messages: texts become text, pictures and videos media, others are refused by name."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation, MediaName
from vlm_serve.preprocess.reading.reader import APIS, read_conversation

NOTES = "# Notes\n\nTwo rows: ä, ß.\n"


def encoded(data: bytes | str) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def chat(part: dict[str, Any]) -> Conversation:
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    return read_conversation(APIS["/v1/chat/completions"], body)


def response(part: dict[str, Any]) -> Conversation:
    body = {"model": "m", "input": [{"role": "user", "content": [part]}]}
    return read_conversation(APIS["/v1/responses"], body)


def message(source: dict[str, Any], **more: Any) -> Conversation:
    block = {"type": "document", "source": source, **more}
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    return read_conversation(APIS["/v1/messages"], body)


def text_in(conversation: Conversation) -> str:
    content = conversation.messages[0]["content"]
    return content if isinstance(content, str) else "".join(each["text"] for each in content)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("notes.md", f"data:text/markdown;base64,{encoded(NOTES)}"),
        ("notes.md", encoded(NOTES)),
        ("notes.txt", f"data:application/octet-stream;base64,{encoded(NOTES)}"),
        ("notes.txt", f"data:text/plain;base64,{encoded(chr(0xFEFF) + NOTES)}"),
    ],
)
def test_a_text_file_is_text_for_every_api(name: str, data: str) -> None:
    expected = f"<document>\n<title>{name}</title>\n{NOTES}\n</document>\n"
    assert (
        text_in(chat({"type": "file", "file": {"filename": name, "file_data": data}})) == expected
    )
    part = {"type": "input_file", "filename": name, "file_data": data}
    assert text_in(response(part)) == expected


def test_a_document_in_base64_is_read() -> None:
    source = {"type": "base64", "media_type": "text/plain", "data": encoded(NOTES)}
    found = text_in(message(source, title="Notes", context="Of May."))
    head = "<title>Notes</title>\n<context>Of May.</context>\n"
    assert found == f"<document>\n{head}{NOTES}\n</document>\n"


@pytest.mark.parametrize(("kind", "modality"), [("image/png", "image"), ("video/mp4", "video")])
def test_pictures_and_videos_in_files_are_media(kind: str, modality: str) -> None:
    url = f"data:{kind};base64,AAAA"
    (medium,) = chat({"type": "file", "file": {"file_data": url}}).media
    assert (medium.modality, medium.joined().source) == (modality, url)
    assert medium.param == "messages[0].content[0].file.file_data" and not medium.document


def test_a_pdf_is_a_document_whose_pages_are_pictures() -> None:
    (medium,) = chat({"type": "file", "file": {"filename": "a.pdf", "file_data": "JVBERi0="}}).media
    assert (medium.modality, medium.document) == ("image", True)
    assert medium.joined().source == "data:application/pdf;base64,JVBERi0="


def test_the_id_of_a_stored_file_tells_its_kind() -> None:
    for start, modality, document in (
        ("file-img-", "image", False),
        ("file-vid-", "video", False),
        ("file-pdf-", "image", True),
        ("file-", "image", False),
    ):
        for made in (
            chat({"type": "file", "file": {"file_id": start + "1"}}),
            response({"type": "input_file", "file_id": start + "1"}),
        ):
            (medium,) = made.media
            assert medium.source == MediaName("file_id", start + "1")
            assert (medium.modality, medium.document) == (modality, document)
    with pytest.raises(InvalidRequestError, match="must come without input_image"):
        response({"type": "input_image", "image_url": "data:,x", "file_id": "file-1"})


@pytest.mark.parametrize(
    ("file", "place", "words"),
    [
        ({"filename": "a.zip", "file_data": "UEsDBA=="}, "file_data", "application/zip"),
        ({"file_data": "UEsDBA=="}, "file_data", "unknown"),
        ({"file_id": ""}, "file_id", "1 to 128"),
        ({"filename": "a.txt", "file_data": encoded(b"\xff\xfe\xfa")}, "file_data", "UTF-8"),
        ({"filename": "a.txt", "file_data": "%%"}, "file_data", "not valid base64"),
        ({"filename": 3, "file_data": "AA"}, "filename", "must be text"),
    ],
)
def test_other_files_are_refused_by_name(file: dict[str, Any], place: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        chat({"type": "file", "file": file})
    assert str(caught.value.param).endswith(place)


@pytest.mark.parametrize("name", ["uuid", "file_id"])
def test_a_name_inside_a_picture_s_object_is_its_name(name: str) -> None:
    inside = {name: "file-img-1"} | ({"url": "https://a/b.png"} if name == "uuid" else {})
    (medium,) = chat({"type": "image_url", "image_url": inside}).media
    if name == "uuid":
        assert (medium.uuid, medium.source) == ("file-img-1", "https://a/b.png")
    else:
        assert medium.source == MediaName("file_id", "file-img-1")


@pytest.mark.parametrize("other", [{"file_data": "data:text/plain;base64,aGk="}, {"file_url": "x"}])
def test_a_file_is_either_named_or_sent(other: dict[str, Any]) -> None:
    file = {"file_id": "file-img-1"}
    for read, part, place in (
        (chat, {"type": "file", "file": file | other}, "messages[0].content[0].file.file_id"),
        (response, {"type": "input_file", **file, **other}, "input[0].content[0].file_id"),
    ):
        with pytest.raises(InvalidRequestError) as raised:
            read(part)
        assert raised.value.param == place
    assert response({"type": "input_file", **file, **dict.fromkeys(other)}).media
