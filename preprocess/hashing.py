"""Content hashes: name the pixels that the model sees (docs/architecture.md#identity)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from blake3 import blake3

from vlm_serve.preprocess.keys import tagged
from vlm_serve.preprocess.reading.conversation import Modality

_DOMAIN = b"vlm-serve content 1"
_PATCH_DOMAIN = b"vlm-serve temporal patch 1"


def content_hash(modality: Modality, pixels: torch.Tensor, grid: tuple[int, int, int]) -> bytes:
    """Return the 32-byte BLAKE3 of an image, or of a frame or slice of a video.

    Args:
        modality: part of the hash: an image and a video frame of equal pixels are different media.
        pixels: post-resize uint8 `[3, height, width]`, contiguous.
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


def patch_hash(frames: Sequence[bytes], size: int) -> bytes:
    """Return the 32-byte hash of a temporal patch, from the content hashes of its frames.

    So a patch of known frames has a known hash, without their pixels.

    Args:
        frames: at most `size` hashes; the last frame is repeated to fill the patch.
    """
    filled = [*frames, *[frames[-1]] * (size - len(frames))]
    fields = (tagged("domain", _PATCH_DOMAIN), tagged("frames", b"".join(filled)))
    return blake3(b"".join(fields)).digest()
