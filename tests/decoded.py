"""Decodes pictures in the tests' own process."""

from __future__ import annotations

from vlm_serve.preprocess.media.images import Pixels, decode_opened, open_image
from vlm_serve.preprocess.media.limits import MediaLimits


def decode_image(data: bytes, limits: MediaLimits) -> Pixels:
    """Return uint8 `[height, width, 3]`, as a decoding process does."""
    return decode_opened(open_image(data, limits), limits)
