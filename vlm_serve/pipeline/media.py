"""Media as Python programs hold them: tensors, arrays of any layout, open files.

The preprocessor takes bytes and uint8 arrays with channels last, and everything here becomes one of
them before it sees a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.fetch import VIDEO_SUFFIXES, naming

_KINDS = ("image", "video")
_CHANNELS = (1, 3, 4)


def with_plain_media(messages: Any) -> Any:
    """Return messages whose media are of kinds that the preprocessor takes.

    Raises MediaError, which names the part, for arrays that are no pictures.
    """
    if not isinstance(messages, list | tuple):
        return messages
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, place: str) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = [_part(part, f"{place}.content[{index}]") for index, part in enumerate(content)]
    return {**message, "content": parts}


def _part(part: Any, place: str) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _KINDS or kind not in part:
        return part
    with naming(place):
        return {**part, kind: plain(part[kind])}


def plain(source: Any) -> Any:
    """Return a medium as the preprocessor takes it: bytes of an open file, uint8 of an array with
    channels last `[..., height, width, channels]`; anything else stays as it is.

    Raises MediaError for arrays of other shapes or types, and for files in text mode.
    """
    if isinstance(source, list | tuple):
        return [plain(frame) for frame in source]
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu()
        source = (source.float() if source.dtype == torch.bfloat16 else source).numpy()
    if isinstance(source, np.ndarray):
        return _bytes_of(_channels_last(source))
    if hasattr(source, "read") and not isinstance(source, Path):
        return _read(source)
    return source


def _read(file: Any) -> bytes:
    """Return all bytes of an open file, from its start if it has one to go back to."""
    if getattr(file, "seekable", lambda: False)():
        file.seek(0)
    data: Any = file.read()
    if not isinstance(data, bytes):
        raise MediaError("a file of a picture or a video must be opened in binary mode")
    return data


def _channels_last(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a picture or frames with channels in the last axis, where they may be in the first of
    the last three. Pictures with one channel have none."""
    if array.ndim not in (3, 4):
        return array
    if array.shape[-1] not in _CHANNELS and array.shape[-3] in _CHANNELS:
        array = np.moveaxis(array, -3, -1)
    return array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return pixels as uint8: floating-point ones from 0 to 1, whole ones from 0 to 255.

    A picture of 16 bits, uint16 `[height, width]`, stays as it is.
    """
    if array.dtype == np.uint8 or (array.dtype == np.uint16 and array.ndim == 2):
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    floating = np.issubdtype(array.dtype, np.floating)
    if not floating and not np.issubdtype(array.dtype, np.integer):
        raise MediaError(f"pixels must be numbers, not {array.dtype}")
    high = 1 if floating else 255
    if array.size and not (array.min() >= 0 and array.max() <= high):  # NaN is no such number.
        said = "floating-point pixels must be from 0 to 1: give uint8 for values from 0 to 255"
        raise MediaError(said if floating else "whole-number pixels must be from 0 to 255")
    return np.rint(array * 255).astype(np.uint8) if floating else array.astype(np.uint8)


def parts_of(media: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the parts for media of the short form; arrays of four axes, and names, bytes or open
    files of videos, are videos."""
    parts = []
    for item in media:
        known = plain(item)
        video = getattr(item, "ndim", 0) == 4 or _looks_like_video(known)
        parts.append(
            {"type": "video", "video": known} if video else {"type": "image", "image": known}
        )
    return parts


def _looks_like_video(item: Any) -> bool:
    if isinstance(item, bytes):
        # ISO media ("ftyp", but not its still-image brands), Matroska / WebM, RIFF AVI.
        is_iso = item[4:8] == b"ftyp" and item[8:12] not in (b"avif", b"heic", b"heix", b"mif1")
        return is_iso or item[:4] == b"\x1aE\xdf\xa3" or item[8:12] == b"AVI "
    if isinstance(item, str | Path):
        name = str(item)
        if name.startswith("data:"):
            return name.startswith("data:video/")
        return name.lower().split("?", 1)[0].endswith(VIDEO_SUFFIXES)
    return False
