"""Limits of the media path. Every limit is checked before the work it bounds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from vlm_serve.errors import MediaError

DEFAULT_FPS = 24.0
"""Frame rate where none is known, as transformers assumes."""

_PILLOW_ERROR_PIXELS = 178_956_970


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Limits set by the operator of the engine.

    Attributes:
        max_images, max_videos: media per prompt; None: unlimited.
        max_image_bytes, max_video_bytes: size of one encoded medium.
        max_image_pixels: width times height, read from the header.
        max_image_scans: passes over its pixels that a progressive JPEG may make.
        max_video_pixels: width times height of one frame.
        max_video_frames: frames in the file or array, sampled or not.
        max_video_seconds: length of a video.
        max_image_decode_seconds, max_decode_seconds: wall time for decoding one image or video.
        max_decode_bytes: memory for decoding one medium, its own bytes not counted.
        max_fetch_seconds: wall time for fetching one URL, redirects included.
        max_fetched_bytes: total size of all media from the start of fetching to the end of
            decoding.
        max_redirects: hops after the first.
        allowed_local_media_path: folder below which file:// URLs may be read; None: nowhere.
        allowed_media_domains: hosts that may be fetched from; empty: every host.
        allow_private_networks: also fetch from addresses that are not global.
    """

    max_images: int | None = None
    max_videos: int | None = None
    max_image_bytes: int = 64 << 20
    max_video_bytes: int = 1 << 30
    max_image_pixels: int = 1 << 26
    max_image_scans: int = 100
    max_video_pixels: int = 1 << 25
    max_video_frames: int = 400_000
    max_video_seconds: float = 4 * 3600.0
    max_image_decode_seconds: float = 30.0
    max_decode_seconds: float = 120.0
    max_decode_bytes: int = 1 << 30
    max_fetch_seconds: float = 30.0
    max_fetched_bytes: int = 2 << 30
    max_redirects: int = 5
    allowed_local_media_path: Path | None = None
    allowed_media_domains: tuple[str, ...] = ()
    allow_private_networks: bool = False

    def __post_init__(self) -> None:
        # Pillow itself refuses larger images.
        assert 0 < self.max_image_pixels <= _PILLOW_ERROR_PIXELS


class LostFramesError(MediaError):
    """Frames that the packets of a file promise do not decode."""


def check_deadline(deadline: float, limits: MediaLimits) -> None:
    """Raise MediaError once a video's decoding is behind its deadline, in monotonic seconds."""
    if time.monotonic() > deadline:
        raise MediaError(f"decoding takes longer than {limits.max_decode_seconds:g} seconds")


def check_video(
    num_frames: int, seconds: float | None, size: tuple[int, ...], limits: MediaLimits
) -> None:
    """Check a video's frames, length and pixels. Raises MediaError if one exceeds its limit.

    Args:
        seconds: its length; None: not known yet.
        size: (height, width).
    """
    if num_frames > limits.max_video_frames:
        raise MediaError(f"the video is over {limits.max_video_frames} frames")
    if seconds is not None and seconds > limits.max_video_seconds:
        raise MediaError(f"the video is over {limits.max_video_seconds:g} seconds")
    if size[0] * size[1] > limits.max_video_pixels:
        raise MediaError(f"the video is over {limits.max_video_pixels} pixels")
