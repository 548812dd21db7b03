"""Reads the source of a media part: a data: URL, a remote file, a path, or bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from vlm_serve.errors import InvalidRequestError, MediaFetchError
from vlm_serve.preprocess.fetch import Hold, fetch, naming, read_file
from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.media_frames import FrameFiles, check_frame_count, frame_sources, places
from vlm_serve.preprocess.pdf_pages import PdfPage
from vlm_serve.preprocess.raw_index import raw_digest
from vlm_serve.preprocess.reading.conversation import MediaPart
from vlm_serve.preprocess.stopping import Stop

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def read_source(part: MediaPart, limits: MediaLimits, stop: Stop, hold: Hold | None = None) -> Any:
    """Return the bytes of a file, `FrameFiles`, or what a Python caller gave.

    Raises MediaFetchError, MediaError or InvalidRequestError, which name the part; OverloadedError
    if `hold` refuses; StoppedError.
    """
    with naming(part.param):
        return _read(part, limits, stop, hold)


def _read(part: MediaPart, limits: MediaLimits, stop: Stop, hold: Hold | None) -> Any:
    source = part.source
    is_image = part.modality == "image"
    max_bytes = limits.max_image_bytes if is_image else limits.max_video_bytes
    frames = frame_sources(source) if not is_image else None
    if frames is not None:
        check_frame_count(frames)
        read = (read_source(each, limits, stop, hold) for each in places(part, frames))
        return FrameFiles(tuple(read))
    if isinstance(source, PdfPage):
        return source.packed
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and (part.url_only or _SCHEME.match(source)):
        return fetch(source, max_bytes=max_bytes, limits=limits, stop=stop, hold=hold)
    if isinstance(source, str | Path):
        try:
            return read_file(Path(source), max_bytes)
        except (OSError, ValueError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            # No message holds a path; the name of the file tells several media apart.
            why = getattr(error, "strerror", None) or "no such path"
            said = f"the file {Path(source).name!r} cannot be read: {why}"
            raise MediaFetchError(said) from None
    if part.url_only:
        raise InvalidRequestError(f"{part.param} must be a URL")
    return source


def is_remote(part: MediaPart) -> bool:
    """Return True if loading the part waits for another machine."""
    sources = part.source if isinstance(part.source, list) else [part.source]
    return any(isinstance(each, str) and each[:5].lower().startswith("http") for each in sources)


def digest_of(source: Any) -> bytes | None:
    """Return `raw_digest` of what was read; None for pictures of Python callers."""
    if isinstance(source, FrameFiles):
        return raw_digest(source.packed)
    if isinstance(source, bytes) or _is_contiguous(source):
        return raw_digest(source)
    return None


def is_data_url(source: Any) -> bool:
    """Return True for the text of a data: URL."""
    return isinstance(source, str) and source[:5].lower() == "data:" and source.isascii()


def _is_contiguous(source: Any) -> bool:
    return (
        isinstance(source, np.ndarray)
        and source.dtype == np.uint8
        and bool(source.flags.c_contiguous)
    )
