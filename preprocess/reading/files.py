"""Reads files in messages: texts become text, pictures, videos and pages of PDF documents media."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError, UnsupportedFieldError
from vlm_serve.preprocess.reading.conversation import Conversation, MediaPart, Modality
from vlm_serve.preprocess.reading.data_url import read_data_url
from vlm_serve.preprocess.reading.values import object_of, short_repr, text_of

FILE_PARTS = frozenset({"file", "input_file"})
MAX_TEXT_BYTES = 16 << 20
_MEDIA: dict[str, Modality] = {"image": "image", "video": "video"}
_TEXTS = frozenset(
    {
        "application/json",
        "application/javascript",
        "application/toml",
        "application/x-ndjson",
        "application/x-yaml",
        "application/xml",
        "application/yaml",
    }
)


def read_file(part: Mapping[str, Any], where: str, conversation: Conversation) -> dict[str, Any]:
    """Convert a part with a file: `file` of chat completions, `input_file` of responses.

    Raises InvalidRequestError, naming the field; UnsupportedFieldError for other kinds of files.
    """
    if part["type"] == "file":
        part, where = object_of(part.get("file"), f"{where}.file"), f"{where}.file"
    for name in ("file_id", "file_url"):
        if part.get(name) is not None:
            raise UnsupportedFieldError(
                f"{where}.{name} is not implemented by this server: send the file in file_data",
                param=f"{where}.{name}",
                code="unsupported_field",
            )
    data, place = text_of(part, "file_data", where), f"{where}.file_data"
    name = text_of(part, "filename", where) if part.get("filename") is not None else ""
    content = file_content(data, name, place, conversation)
    if content["type"] != "text":
        return content
    return document([content], {"title": name} if name else {})[0]


def file_content(data: str, name: str, where: str, conversation: Conversation) -> dict[str, Any]:
    """Convert a file in base64, as a data: URL or without its head; a medium is collected.

    Args:
        name: the client's name for it; its ending tells its type if the URL does not.

    Raises as `read_file`.
    """
    head = data[:256].partition(",")[0] if data[:5].lower() == "data:" else ""
    kind = head[len("data:") :].partition(";")[0].strip().lower()
    if kind in ("", "application/octet-stream"):
        kind = mimetypes.guess_type(name)[0] or kind
    url = data if head else f"data:{kind};base64,{data}"
    modality = _MEDIA.get(kind.partition("/")[0])
    if modality is not None:
        return conversation.medium(MediaPart(modality, url, {}, where, url_only=True))
    if kind.startswith("text/") or kind in _TEXTS:
        return {"type": "text", "text": _text_of(url, where)}
    if kind == "application/pdf":
        medium = MediaPart("image", url, {}, where, url_only=True, document=True)
        return conversation.medium(medium)
    what = f"this server does not read files of the type {short_repr(kind)}"
    unknown = "the type of the file is unknown: give filename, or a data: URL that names the type"
    raise UnsupportedFieldError(
        f"{where}: {what if kind else unknown}", param=where, code="unsupported_field"
    )


def document(inside: list[dict[str, Any]], named: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return content parts between tags, in one part if all are text.

    Args:
        named: what else is said of the document, such as its title, by tag.
    """
    head = "".join(f"<{name}>{text}</{name}>\n" for name, text in named.items())
    parts = [
        {"type": "text", "text": f"<document>\n{head}"},
        *inside,
        {"type": "text", "text": "\n</document>\n"},
    ]
    if any(part["type"] != "text" for part in inside):
        return parts
    return [{"type": "text", "text": "".join(part["text"] for part in parts)}]


def _text_of(url: str, where: str) -> str:
    data = read_data_url(url, MAX_TEXT_BYTES, where)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{where} is not text in UTF-8", param=where) from None
