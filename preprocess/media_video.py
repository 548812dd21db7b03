"""Reads video files in memory as numbered frames, through PyAV.

A file is read twice. The first pass decodes nothing and finds the frame times and the key frames.
The second decodes only what the wanted frames need. Frame i is the i-th in presentation order.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import av
import numpy as np

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.limits import DEFAULT_FPS, MediaLimits, check_video
from vlm_serve.preprocess.media_image import Pixels

# Playlists, SDP and concat scripts open files and ports named by the client, so they are not
# allowed. Without protocols, nothing could be opened anyway.
_OPEN_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts",
    "protocol_whitelist": "",
}
# In these codecs no other frame needs a non-reference frame, so it can be skipped. (In HEVC, higher
# temporal layers may still need it.)
_SKIP_SAFE = frozenset({"h264", "mpeg4", "mpeg2video", "mpeg1video"})
# A skip drains the decoder first; below this many packets it does not pay.
_MIN_GAP = 12


class _Reader:
    """A file object over bytes, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def read(self, size: int) -> bytes:
        piece = bytes(self._data[self._at : self._at + size])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = min(max(base + offset, 0), len(self._data))
        return self._at

    def tell(self) -> int:
        return self._at


class EncodedVideo:
    """A video file in memory.

    Args:
        data: bytes of an MP4/MOV, Matroska/WebM, AVI or MPEG-TS file.
        fps: replaces the file's own average rate and determines the frame times.
        limits: limits on bytes, frames, pixels, length and decoding time.
        param: the request field to name in errors.

    Raises MediaError if the bytes are not such a video or a limit is exceeded.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        fps: float | None,
        limits: MediaLimits,
        param: str | None = None,
    ) -> None:
        if not data:
            raise MediaError("the video is empty", param=param)
        if len(data) > limits.max_video_bytes:
            raise MediaError(f"the video is over {limits.max_video_bytes} bytes", param=param)
        self._data, self._limits, self._param = data, limits, param
        self._deadline = time.monotonic() + limits.max_decode_seconds
        try:
            self._index_packets(fps)
        except (av.FFmpegError, ValueError, LookupError, OSError, EOFError) as error:
            if isinstance(error, MediaError):
                raise
            raise MediaError("not a video of a supported format", param=param) from None

    def _open(self) -> tuple[Any, Any]:
        container = av.open(
            _Reader(memoryview(self._data)), options=_OPEN_OPTIONS, metadata_errors="replace"
        )
        stream = container.streams.best("video")
        if stream is None:
            container.close()
            raise MediaError("the file has no video stream", param=self._param)
        if stream.codec_context is None:
            container.close()
            raise MediaError("the video's codec is not supported", param=self._param)
        return container, stream

    def _index_packets(self, fps: float | None) -> None:
        container, stream = self._open()
        with container:
            size = stream.codec_context.height, stream.codec_context.width
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            self.fps = fps or rate or DEFAULT_FPS
            check_video(stream.frames, self.fps, size, self._limits, self._param)
            self._pts: list[int | None] = []
            self._keys: list[bool] = []
            shown: list[int | None] = []
            for packet in container.demux(stream):
                self._check_time()
                if packet.size == 0:
                    continue
                self._pts.append(packet.pts)
                self._keys.append(packet.is_keyframe)
                if not packet.is_discard:
                    shown.append(packet.pts)
                check_video(len(shown), self.fps, size, self._limits, self._param)
            if not shown:
                raise MediaError("the video has no frames", param=self._param)
            known = [pts for pts in shown if pts is not None]
            # Without distinct times, frames can only be counted in the decoder's output.
            self._by_time = len(known) == len(shown) == len(set(known))
            self._shown = sorted(known)
            self._skip_safe = stream.codec_context.name in _SKIP_SAFE
            self.times: Sequence[float] = self._find_times(len(shown), fps, stream.time_base)

    def _find_times(self, total: int, fps: float | None, time_base: Any) -> list[float]:
        if fps is not None or not self._by_time or time_base is None:
            return [index / self.fps for index in range(total)]
        first = self._shown[0]
        return [float((pts - first) * time_base) for pts in self._shown]

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise MediaError(
                f"decoding takes longer than {self._limits.max_decode_seconds:g} seconds",
                param=self._param,
            )

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """See `Video.frames`. Raises MediaError if the file proves to be damaged."""
        assert list(indices) == sorted(indices)
        self._deadline = time.monotonic() + self._limits.max_decode_seconds
        decoded = self._decode_by_time if self._by_time else self._decode_by_count
        done = 0
        try:
            for index, pixels in decoded(sorted(set(indices))):
                while done < len(indices) and indices[done] == index:
                    yield pixels
                    done += 1
        except (av.FFmpegError, ValueError, EOFError, OSError) as error:
            if isinstance(error, MediaError):
                raise
            raise MediaError("the video is damaged", param=self._param) from None
        if done < len(indices):
            raise MediaError("the video is truncated or damaged", param=self._param)

    def _decode_by_count(self, wanted: list[int]) -> Iterator[tuple[int, Pixels]]:
        container, stream = self._open()
        with container:
            for index, frame in enumerate(container.decode(stream)):
                self._check_time()
                if wanted and index == wanted[0]:
                    wanted = wanted[1:]
                    yield index, self._to_rgb(frame)
                if not wanted:
                    return

    def _decode_by_time(self, wanted: list[int]) -> Iterator[tuple[int, Pixels]]:
        number_of = {self._shown[index]: index for index in wanted}
        segments = self._segments(sorted(number_of))
        container, stream = self._open()
        with container:
            context = stream.codec_context
            context.thread_type = "AUTO"
            context.thread_count = min(4, os.cpu_count() or 1)
            for frame in self._decode_segments(container, stream, segments, number_of):
                number = number_of.pop(frame.pts, None)
                if number is not None:
                    yield number, self._to_rgb(frame)
                if not number_of:
                    return

    def _segments(self, wanted: list[int]) -> list[tuple[int, int]]:
        """Return the packet ranges, in decoding order, needed for the wanted times.

        Each range starts at a key frame that precedes its first wanted frame in both orders.
        """
        packet_of = {pts: number for number, pts in enumerate(self._pts)}
        keys = [number for number, key in enumerate(self._keys) if key]
        segments: list[tuple[int, int]] = []
        for pts in wanted:
            number = packet_of[pts]
            at = bisect.bisect_right(keys, number) - 1
            while at >= 0 and (self._pts[keys[at]] or 0) > pts:
                at -= 1
            start = keys[at] if at >= 0 else 0
            if segments and start < segments[-1][1] + _MIN_GAP:
                segments[-1] = segments[-1][0], max(segments[-1][1], number + 1)
            else:
                segments.append((start, number + 1))
        return segments

    def _decode_segments(
        self,
        container: Any,
        stream: Any,
        segments: list[tuple[int, int]],
        wanted: dict[int, int],
    ) -> Iterator[Any]:
        context, number, at = stream.codec_context, -1, 0
        for packet in container.demux(stream):
            self._check_time()
            if packet.size == 0:
                continue
            number += 1
            start, end = segments[at]
            if number < start:
                continue
            if self._skip_safe:
                context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            yield from context.decode(packet)
            if number + 1 == end:
                # Drain the decoder before skipping the packets up to the next segment.
                yield from context.decode(None)
                context.flush_buffers()
                at += 1
                if at == len(segments):
                    return

    def _to_rgb(self, frame: Any) -> Pixels:
        if frame.width * frame.height > self._limits.max_video_pixels:
            raise MediaError(
                f"the video is over {self._limits.max_video_pixels} pixels", param=self._param
            )
        pixels = frame.to_ndarray(format="rgb24")
        # The display matrix rotates counter-clockwise, as rot90 does.
        return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90) % 4))
