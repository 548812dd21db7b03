"""Damaged files of every kind: a medium or an error, and the next one is read as ever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mutated_media import KINDS, Mutated, mutated, whole

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.decoders import Decoders
from vlm_serve.preprocess.media.images import PdfPage
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.system.stopping import Stop

LIMITS = MediaLimits(max_decode_seconds=20.0, max_image_decode_seconds=20.0)


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    made = Decoders()
    yield made
    made.close()


def decode(decoders: Decoders, file: Mutated) -> int:
    """Return the number of pictures."""
    data = file.data
    if file.modality == "document":
        pages = decoders.pages(LIMITS, data)
        data = PdfPage(data, pages - 1).packed
    if file.modality != "video":
        with decoders.image(data, LIMITS, Stop()) as pixels:
            assert pixels.dtype == np.uint8 and pixels.ndim == 3
            return 1
    with decoders.video(file.data, None, LIMITS, Stop()) as video:
        assert video.fps > 0 and list(video.times) == sorted(video.times)
        return len(list(video.frames([0, len(video.times) - 1])))


@pytest.mark.parametrize("kind", KINDS)
def test_the_sound_files_are_read(decoders: Decoders, kind: str) -> None:
    seeds = (seed for seed in range(1000) if mutated(seed).kind == kind)
    assert decode(decoders, Mutated(kind, mutated(next(seeds)).modality, whole(kind)))


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_damaged_files_are_media_or_errors(decoders: Decoders, first: int) -> None:
    outcomes = []
    for seed in range(first, first + 25):
        try:
            outcomes.append(decode(decoders, mutated(seed)))
        except MediaError:
            outcomes.append(0)
    assert len(set(outcomes)) > 1, "every file is refused, or none"
