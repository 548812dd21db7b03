"""What a request may ask of the media path. Every bound is checked before the work it bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PILLOW_ERROR_PIXELS = 178_956_970


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Bounds set by whoever runs the engine.

    Attributes:
        max_images, max_videos: per prompt; None means no bound.
        max_image_bytes, max_video_bytes: of one encoded medium.
        max_image_pixels: width times height, read from the header.
        max_video_pixels: width times height of one frame.
        max_video_frames: frames in the file or array, sampled or not.
        max_video_seconds: length of a video.
        max_decode_seconds: wall time for decoding one video.
        max_fetch_seconds: wall time for fetching one URL, redirects included.
        max_redirects: hops after the first.
        allowed_local_media_path: file:// URLs below it may be read; None: none may.
        allowed_media_domains: hosts that may be fetched from; empty: every host.
        allow_private_networks: also fetch from addresses that are not global.
    """

    max_images: int | None = None
    max_videos: int | None = None
    max_image_bytes: int = 64 << 20
    max_video_bytes: int = 1 << 30
    max_image_pixels: int = 1 << 26
    max_video_pixels: int = 1 << 25
    max_video_frames: int = 400_000
    max_video_seconds: float = 4 * 3600.0
    max_decode_seconds: float = 120.0
    max_fetch_seconds: float = 30.0
    max_redirects: int = 5
    allowed_local_media_path: Path | None = None
    allowed_media_domains: tuple[str, ...] = ()
    allow_private_networks: bool = False

    def __post_init__(self) -> None:
        # Pillow refuses such images itself.
        assert 0 < self.max_image_pixels <= _PILLOW_ERROR_PIXELS
