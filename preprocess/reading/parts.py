"""Reads parts of a message's content: texts, images and videos in OpenAI's forms and Python's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError, UnsupportedFieldError
from vlm_serve.preprocess.reading.conversation import Conversation, MediaPart, Modality
from vlm_serve.preprocess.reading.files import FILE_PARTS, read_file
from vlm_serve.preprocess.reading.values import list_of, object_of, short_repr, text_of, unsupported

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
# Accepted and ignored: ids (content hashes identify media), and file types (the file itself gives
# its type).
_IGNORED = frozenset({"uuid", "format"})
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


def text_part(text: str) -> dict[str, Any]:
    """Return a text part as templates see it."""
    return {"type": "text", "text": text}


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
        return read_file(part, where, conversation)
    if not isinstance(kind, str) or kind not in _MEDIA_PARTS:
        known = ", ".join(sorted({"text", *FILE_PARTS, *_MEDIA_PARTS}))
        raise UnsupportedFieldError(
            f"{where}.type must be one of {known}, not {short_repr(kind)}",
            param=f"{where}.type",
            code="unsupported_field",
        )
    if part.get("file_id") is not None:
        raise unsupported(f"{where}.file_id", part["file_id"])
    return conversation.medium(_read_media(part, kind, where))


def _read_media(part: Mapping[str, Any], kind: str, where: str) -> MediaPart:
    modality = _MEDIA_PARTS[kind]
    name = next((key for key in (kind, f"{modality}_url", modality, "url") if key in part), None)
    if name is None:
        raise InvalidRequestError(f"{where}.{kind} is missing", param=f"{where}.{kind}")
    source, options = part[name], dict(part)
    if isinstance(source, Mapping):
        options |= source
        source = source.get("url")
        name += ".url"
    for key in options.keys() & _REFUSED:
        raise InvalidRequestError(
            f"{where}.{key} cannot be set per request", param=f"{where}.{key}"
        )
    if source is None:
        raise InvalidRequestError(f"{where}.{name} is missing", param=f"{where}.{name}")
    known = _OPTIONS[modality] | _IGNORED | {"type", kind, f"{modality}_url", modality, "url"}
    given = {key: value for key, value in options.items() if value is not None}
    for key in given.keys() - known:
        raise InvalidRequestError(
            f"{where}.{short_repr(key)} is not an option for {modality}s: the options are "
            + ", ".join(sorted(_OPTIONS[modality])),
            param=where,
        )
    given = {key: given[key] for key in _OPTIONS[modality] & given.keys()}
    return MediaPart(modality, source, given, f"{where}.{name}", url_only=kind != modality)
