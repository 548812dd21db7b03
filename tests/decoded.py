"""Decodes pictures in the tests' own process."""

from __future__ import annotations

from vlm_serve.preprocess.limits import MediaLimits
from vlm_serve.preprocess.media_image import Pixels, decode_opened, open_image


def decode_image(data: bytes, limits: MediaLimits) -> Pixels:
    """Return uint8 `[height, width, 3]`, as a decoding process does."""
    return decode_opened(open_image(data, limits), limits)
