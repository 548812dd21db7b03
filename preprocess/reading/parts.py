"""Reads parts of a message's content: texts, images and videos in OpenAI's forms and Python's.

Files are parts too: texts become text, pictures, videos and pages of PDF documents media.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vlm_serve.errors import InvalidRequestError, UnsupportedFieldError
from vlm_serve.preprocess.reading.conversation import (
    Conversation,
    MediaName,
    MediaPart,
    Modality,
    text_part,
)
from vlm_serve.preprocess.reading.data_url import read_data_url
from vlm_serve.preprocess.reading.values import list_of, object_of, short_repr, text_of

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_MEDIA_PARTS: dict[str, Modality] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
_OPTIONS: dict[Modality, frozenset[str]] = {
    "image": frozenset({"detail", "downsample_mode", "max_pixels", "max_slice_nums", "min_pixels"}),
    "video": frozenset(
        {
            "downsample_mode",
            "fps",
            "max_frame_pixels",
            "max_frames",
            "max_slice_nums",
            "num_frames",
            "sample_fps",
            "sampling",
        }
    ),
}
# Accepted and ignored: the file itself gives its type.
_IGNORED = frozenset({"format"})
# Rejected: processor options of transformers that would give pixels unlike the training data.
_REFUSED = frozenset(
    {
        "do_convert_rgb",
        "do_normalize",
        "do_rescale",
        "do_resize",
        "do_sample_frames",
        "image_mean",
        "image_std",
        "mean",
        "merge_size",
        "patch_size",
        "resample",
        "rescale_factor",
        "resized_height",
        "resized_width",
        "size",
        "std",
        "temporal_patch_size",
        "total_pixels",
    }
)


def read_content(content: Any, where: str, conversation: Conversation) -> Any:
    """Convert a message's content: text, None, or a list of parts whose media are collected.

    Args:
        where: its place in the request, for errors.

    Raises InvalidRequestError, naming the part and field at fault.
    """
    if content is None or isinstance(content, str):
        return None if content is None else str(content)
    parts = list_of(content, where, "text or a list of parts")
    return [read_part(part, f"{where}[{at}]", conversation) for at, part in enumerate(parts)]


def read_part(part: Any, where: str, conversation: Conversation) -> dict[str, Any]:
    """Convert one part for templates; a medium is collected. Raises as `read_content`."""
    kind = object_of(part, where).get("type")
    if isinstance(kind, str) and kind in _TEXT_PARTS:
        name = "refusal" if kind == "refusal" and "refusal" in part else "text"
        return text_part(str(text_of(part, name, where)))
    if isinstance(kind, str) and kind in FILE_PARTS:
        try:
            return read_file(part, where, conversation)
        except InvalidRequestError as error:
            if not conversation.in_result:
                raise
            return conversation.unread(error, where)
    if kind in ("input_audio", "audio", "audio_url"):
        raise UnsupportedFieldError(
            f"{where}.type is {kind!r}, but this server has no model that hears audio",
            param=f"{where}.type",
            code="unsupported_field",
        )
    if not isinstance(kind, str) or kind not in _MEDIA_PARTS:
        known = ", ".join(sorted({"text", *FILE_PARTS, *_MEDIA_PARTS}))
        raise UnsupportedFieldError(
            f"{where}.type must be one of {known}, not {short_repr(kind)}",
            param=f"{where}.type",
            code="unsupported_field",
        )
    return conversation.medium(_read_media(part, kind, where))


MAX_NAME = 128
"""Most characters of a `uuid` or `file_id`."""
FILE_KINDS = {"file-img-": "image", "file-vid-": "video", "file-pdf-": "document"}
"""Beginnings of the ids of stored media, by which a part's kind is known without the file."""
_HASH = re.compile(r"hash:[0-9a-f]{32}")


def url_or_name(url: Any, where: str) -> Any:
    """Return what a URL stands for: the medium of a hash, or whatever the URL is.

    Raises InvalidRequestError for a malformed hash.
    """
    if not isinstance(url, str) or url[:5] != "hash:":
        return url
    if not _HASH.fullmatch(url):
        raise InvalidRequestError(
            f"{where} must be hash: with the 32 digits of an item_hash", param=where
        )
    return MediaName("hash", url[5:])


def _name_of(part: Mapping[str, Any], field: str, where: str) -> str:
    name = text_of(part, field, where)
    if not 0 < len(name) <= MAX_NAME:
        place = f"{where}.{field}"
        raise InvalidRequestError(f"{place} must have 1 to {MAX_NAME} characters", param=place)
    return name


def stored_file(part: Mapping[str, Any], where: str, modality: Modality | None = None) -> MediaPart:
    """Return the medium of a `file_id`, whose beginning tells its kind.

    Args:
        modality: the kind that is asked for; None: any, a PDF document too.

    Raises InvalidRequestError if it is of another kind.
    """
    file_id, place = _name_of(part, "file_id", where), f"{where}.file_id"
    kind = FILE_KINDS.get(file_id[:9], "image")
    if modality is not None and kind != modality:
        raise InvalidRequestError(
            f"{place}: the file is of the kind {kind}, not {modality}", param=place
        )
    return MediaPart(
        "video" if kind == "video" else "image",
        MediaName("file_id", file_id),
        {},
        place,
        url_only=True,
        document=kind == "document",
    )


def _read_media(part: Mapping[str, Any], kind: str, where: str) -> MediaPart:
    modality = _MEDIA_PARTS[kind]
    names = (kind, f"{modality}_url", modality, "url")
    name = next((key for key in names if key in part), kind)
    source, options = part.get(name), dict(part)
    if isinstance(source, Mapping):
        options |= source
        source = source.get("url")
        name += ".url"
    uuid = "" if options.get("uuid") is None else _name_of(options, "uuid", where)
    for key in options.keys() & _REFUSED:
        raise InvalidRequestError(
            f"{where}.{key} cannot be set per request", param=f"{where}.{key}"
        )
    stored = options.get("file_id") is not None
    if stored and source is not None:
        place = f"{where}.file_id"
        raise InvalidRequestError(f"{place} must come without {kind}", param=place)
    if source is None and not uuid and not stored:
        raise InvalidRequestError(f"{where}.{name} is missing", param=f"{where}.{name}")
    known = _OPTIONS[modality] | _IGNORED | {"type", "uuid", "file_id", *names}
    given = {key: value for key, value in options.items() if value is not None}
    for key in given.keys() - known:
        raise InvalidRequestError(
            f"{where}.{short_repr(key)} is not an option for {modality}s: the options are "
            + ", ".join(sorted(_OPTIONS[modality])),
            param=where,
        )
    given = {key: given[key] for key in _OPTIONS[modality] & given.keys()}
    if stored:
        return replace(stored_file(options, where, modality), options=given, uuid=uuid)
    url_only, place = kind != modality, f"{where}.{name}"
    if source is None:
        source, place = MediaName("uuid", uuid), f"{where}.uuid"
    elif url_only:
        source = url_or_name(source, place)
    return MediaPart(modality, source, given, place, url_only=url_only, uuid=uuid)


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
    if part.get("file_id") is not None:
        if any(part.get(name) is not None for name in ("file_data", "file_url")):
            place = f"{where}.file_id"
            raise InvalidRequestError(f"{place} must come without bytes or a URL", param=place)
        return conversation.medium(stored_file(part, where))
    source = "file_data" if part.get("file_url") is None else "file_url"
    data, place = text_of(part, source, where), f"{where}.{source}"
    if source == "file_url" and data[:5].lower() != "data:":
        return document_at(data, place, conversation)
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
        return text_part(_text_of(url, where))
    if kind == "application/pdf":
        return document_at(url, where, conversation)
    reason = f"this server does not read files of the type {short_repr(kind)}"
    unknown = "the type of the file is unknown: give filename, or a data: URL that names the type"
    raise UnsupportedFieldError(
        f"{where}: {reason if kind else unknown}", param=where, code="unsupported_field"
    )


def document_at(url: str, where: str, conversation: Conversation) -> dict[str, Any]:
    """Collect the URL of a PDF document, which may also be that of a text if it is fetched."""
    return conversation.medium(MediaPart("image", url, {}, where, url_only=True, document=True))


def document(
    inside: list[dict[str, Any]], named: Mapping[str, str], tag: str = "document"
) -> list[dict[str, Any]]:
    """Return content parts between tags, in one part if all are text.

    Args:
        named: what else is said of the document, such as its title, by tag.
    """
    head = "".join(f"<{name}>{text}</{name}>\n" for name, text in named.items())
    parts = [text_part(f"<{tag}>\n{head}"), *inside, text_part(f"\n</{tag}>\n")]
    if any(part["type"] != "text" for part in inside):
        return parts
    return [text_part("".join(part["text"] for part in parts))]


def _text_of(url: str, where: str) -> str:
    data = read_data_url(url, MAX_TEXT_BYTES, where)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{where} is not text in UTF-8", param=where) from None
