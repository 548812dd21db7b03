"""Content hashes: name the pixels that the model sees (docs/architecture.md#identity)."""

from __future__ import annotations

import torch
from blake3 import blake3

from vlm_serve.preprocess.keys import tagged
from vlm_serve.preprocess.reading.conversation import Modality

_DOMAIN = b"vlm-serve content 1"


def content_hash(modality: Modality, pixels: torch.Tensor, grid: tuple[int, int, int]) -> bytes:
    """Return the 32-byte BLAKE3 of an image or of one temporal patch of a video.

    Args:
        modality: part of the hash: an image and a video frame of equal pixels are different media.
        pixels: post-resize uint8, `[3, height, width]` or `[frames, 3, height, width]`, contiguous.
        grid: (1, h, w) in patches.
    """
    assert pixels.dtype == torch.uint8 and pixels.is_contiguous()
    fields = (
        tagged("domain", _DOMAIN),
        tagged("modality", modality),
        tagged("dtype", "uint8"),
        tagged("shape", ",".join(map(str, pixels.shape))),
        tagged("grid", ",".join(map(str, grid))),
    )
    hasher = blake3(b"".join(fields))
    # The pixels come last and the shape gives their length: no prefix and no copy is needed.
    hasher.update(pixels.numpy().reshape(-1).data)
    return hasher.digest()
