"""Reads video files in memory as numbered frames, through PyAV.

A file is read twice. The first pass decodes nothing and finds the frame times and the key frames.
The second decodes only what the wanted frames need, from the key frame before each. If a file's
marks of key frames prove wrong, everything is decoded from the start. Frame i is the i-th in
presentation order. A file may end anywhere, or be unreadable from some place on: then it has the
frames before. A file may also begin anywhere: then it has the frames from the first key frame on.
Where frames are lost in the middle, a survey finds those that decode, and the file has these.
"""

from __future__ import annotations

import bisect
import math
import os
import struct
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import PIL.Image
from av.sidedata.sidedata import SideDataContainer, Type
from av.video.frame import PictureType
from av.video.reformatter import VideoReformatter

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.images import MP4, Pixels, file_kind
from vlm_serve.preprocess.media.limits import (
    LostFramesError,
    MediaLimits,
    check_deadline,
    check_video,
)
from vlm_serve.preprocess.media.video_times import (
    FrameTimes,
    PacketTime,
    join_clocks,
    measure,
    strictly_ascending,
)

VIDEO_FORMATS = "MP4, MOV, WebM, Matroska, AVI, MPEG, FLV, WMV, bare H.264 and HEVC"
# Playlists, SDP and concat scripts open files and ports named by the client, so they are not
# allowed. Without protocols, nothing could be opened anyway.
_OPEN_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,flv,asf,mpeg,h264,hevc",
    "protocol_whitelist": "",
}
# In these codecs no other frame needs a non-reference frame, so it can be skipped. (In HEVC, higher
# temporal layers may still need it.)
_SKIP_SAFE = frozenset({"h264", "mpeg4", "mpeg2video", "mpeg1video"})
# A skip drains the decoder first; below this many packets it does not pay.
_MIN_GAP = 12
_LEAPING = frozenset({"mpegts", "mpeg"})
"""Formats with clocks of possible leaps ahead."""
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_ERRORS = (av.FFmpegError, ValueError, LookupError, EOFError, OSError)


_HEAD = struct.Struct(">I4s")
_LONG = struct.Struct(">Q")
_LONG_HEAD = _HEAD.size + _LONG.size
_FRAGMENT = b"moof"
MAX_PIXEL_ASPECT = 8
"""Larger ratios of a pixel's sides come from a broken header."""
_MATRIX = struct.Struct("=9i")
_WHITE = 255.0


class EncodedVideo:
    """A video file in memory.

    Args:
        data: bytes of an MP4/MOV, Matroska/WebM, AVI, MPEG, FLV or ASF/WMV file.
        fps: replaces the file's own average rate and determines the frame times.
        limits: limits on bytes, frames, pixels, length and decoding time.
        survey: decode everything first, and leave out what does not decode.

    Attributes:
        fps, times, steady, cut_short, sound: see `Video`.
        num_decoded: frames decoded so far, for those that were asked for.

    Raises MediaError if the bytes are not such a video or a limit is exceeded.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        fps: float | None,
        limits: MediaLimits,
        *,
        survey: bool = False,
    ) -> None:
        if not data:
            raise MediaError("the video is empty")
        if len(data) > limits.max_video_bytes:
            raise MediaError(f"the video is over {limits.max_video_bytes} bytes")
        self._data, self._limits = _readable_part(memoryview(data)), limits
        self.cut_short = len(self._data) < len(data)
        self.sound, self.num_decoded = True, 0
        self._surveyed, self._skipped = survey, 0
        self._converter = VideoReformatter()
        self._deadline = time.monotonic() + limits.max_decode_seconds
        if _lacks_index(self._data):
            raise MediaError(self._why_unread())
        try:
            self._index_packets(fps, survey)
        except _ERRORS as error:
            if isinstance(error, MediaError):
                raise
            raise MediaError(self._why_unread()) from None

    def _why_unread(self) -> str:
        kind = file_kind(self._data)
        if kind == MP4 and _lacks_index(self._data):
            return (
                "the video has no index (moov): it was cut short or is still being written; write "
                "fragmented MP4, MPEG-TS or Matroska to read a recording in progress"
            )
        return f"not a video of a supported format ({VIDEO_FORMATS})" + (
            f": it is {kind}" if kind else ""
        )

    def _open(self) -> tuple[Any, Any]:
        container = av.open(Reader(self._data), options=_OPEN_OPTIONS, metadata_errors="replace")
        stream = container.streams.best("video")
        if stream is None:
            container.close()
            raise MediaError("the file has no video stream")
        if stream.codec_context is None:
            container.close()
            raise MediaError("the video's codec is not supported")
        return container, stream

    def _index_packets(self, fps: float | None, survey: bool) -> None:
        container, stream = self._open()
        with container:
            size = stream.codec_context.height, stream.codec_context.width
            check_video(stream.frames, None, size, self._limits)
            packets, keys, whole = self._read_packets(container, stream, size)
            leaps = container.format.name in _LEAPING
            self._time_base: Fraction = stream.time_base or Fraction(1, 1)
            self._pts = join_clocks(packets, self._time_base, may_leap=leaps)
            self._keys = keys
            self._skip_safe = stream.codec_context.name in _SKIP_SAFE
            self._aspect: Fraction | None = (
                stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio
            )
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            self.cut_short = self.cut_short or not whole
            self._find_shown(packets)
            key = keys.index(True) if any(keys) else 0
            if survey or (self._shown[0] < (self._pts[key] or 0) if self._by_time else key):
                self._leave_out(whole=survey or not self._by_time)
            timeline = self._find_times(rate, fps, known=stream.time_base is not None)
            self.times, self.fps, self.steady = timeline.seconds, timeline.fps, timeline.steady
            self.sound = self.sound and self._by_time and not self.cut_short
            steady_length = len(self.times) / self.fps
            seconds = steady_length if self.steady else self.times[-1] + 1 / self.fps
            check_video(len(self.times), seconds, size, self._limits)

    def _read_packets(
        self, container: Any, stream: Any, size: tuple[int, int]
    ) -> tuple[list[PacketTime], list[bool], bool]:
        """Return the packets, their flags as key frames, and whether the file ends in order.

        Incomplete packets at the end of a file are left out.
        """
        packets: list[PacketTime] = []
        keys: list[bool] = []
        shown, complete, whole = 0, 0, True
        try:
            for packet in container.demux(stream):
                self._check_time()
                if packet.size == 0:
                    continue
                packets.append(PacketTime(packet.pts, packet.dts, not packet.is_discard))
                keys.append(packet.is_keyframe)
                shown += not packet.is_discard
                complete = complete if packet.is_corrupt else len(packets)
                self.sound = self.sound and not packet.is_corrupt
                check_video(shown, None, size, self._limits)
        except _ERRORS as error:
            if isinstance(error, MediaError):
                raise
            whole = False
        whole = whole and complete == len(packets)
        return packets[:complete], keys[:complete], whole

    def _find_shown(self, packets: Sequence[PacketTime]) -> None:
        shown = [pts for pts, packet in zip(self._pts, packets, strict=True) if packet.shown]
        if not shown:
            raise MediaError("the video has no frames")
        self._shown, self._total = sorted(pts for pts in shown if pts is not None), len(shown)
        # Without distinct times, frames can only be counted in the decoder's output.
        self._by_time = len(self._shown) == len(shown) and strictly_ascending(self._shown)

    def _leave_out(self, *, whole: bool) -> None:
        """Leave out what does not decode before the first key frame is shown; if `whole`, anywhere.

        Between key frames some decoders begin with grey pictures, others with none.
        """
        found, key = list[Any](), None
        container, stream = self._open()
        with container:
            for frame in self._decode_segments(container, stream, [(0, len(self._pts))], None):
                if self._by_time and (frame.pts is None or (found and frame.pts <= found[-1])):
                    continue
                if key is None and _is_key(frame):
                    key = len(found)
                found.append(frame.pts)
                if key is not None and not whole:
                    break
        self._skipped = 0 if self._keys[0] else key or 0
        found = found[self._skipped :]
        if not found:
            raise MediaError("the video is damaged: no frame of it decodes")
        if self._by_time:
            kept, rest = frozenset(found), math.inf if whole else found[-1]
            self._shown = [pts for pts in self._shown if pts in kept or pts > rest]
        left = len(self._shown) if self._by_time else len(found)
        self.cut_short = self.cut_short or left < self._total
        self._total = left

    def _find_times(self, rate: float, fps: float | None, *, known: bool) -> FrameTimes:
        if fps is not None:
            return FrameTimes.even(self._total, fps)
        times = self._shown if self._by_time else None
        return measure(times, self._total, self._time_base if known else None, rate)

    def _check_time(self) -> None:
        check_deadline(self._deadline, self._limits)

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """See `Video.frames`. Raises LostFramesError if the file proves to be damaged."""
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
            raise LostFramesError("the video is damaged") from None
        if done < len(indices):
            raise LostFramesError("the video is truncated or damaged")

    def _decode_by_count(self, wanted: list[int]) -> Iterator[tuple[int, Pixels]]:
        container, stream = self._open()
        with container:
            segments = [(0, len(self._pts))]
            frames = self._decode_segments(container, stream, segments, None)
            for index, frame in enumerate(frames, start=-self._skipped):
                if index == wanted[0]:
                    wanted = wanted[1:]
                    yield index, self._to_rgb(frame)
                if not wanted:
                    return

    def _decode_by_time(self, wanted: list[int]) -> Iterator[tuple[int, Pixels]]:
        everything = [(0, len(self._pts))]
        jumps = everything
        if not self._surveyed:  # what damage leaves of a frame depends on those before it
            jumps = self._segments([self._shown[index] for index in wanted])
        for index, pixels in self._decode_jumps(wanted, jumps):
            yield index, pixels
            wanted = wanted[1:]
        if wanted and jumps[-1][0]:
            # A frame did not come, or not as it should: the key frames are not where the file says.
            self.sound = False
            yield from self._decode_jumps(wanted, everything)

    def _decode_jumps(
        self, wanted: list[int], segments: list[tuple[int, int]]
    ) -> Iterator[tuple[int, Pixels]]:
        """Yield the wanted frames in order; end where one is missing or a jump went wrong."""
        number_of = {self._shown[index]: index for index in wanted}
        container, stream = self._open()
        with container:
            for frame in self._decode_segments(container, stream, segments, number_of):
                number = number_of.pop(frame.pts, None)
                if number is None:
                    continue
                if number != wanted[0]:
                    return
                wanted = wanted[1:]
                yield number, self._to_rgb(frame)
                if not wanted:
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
        wanted: dict[int, int] | None,
    ) -> Iterator[Any]:
        """Yield the frames of packet ranges; `wanted` has the times of the only ones needed.

        Ends early if the first frame behind a jump is not a key frame.
        """
        context, number, at = _decoder(stream, threads=not self._surveyed), -1, 0
        begins = segments[0][0] > 0
        for packet in container.demux(stream):
            self._check_time()
            if packet.size == 0:
                continue
            number += 1
            start, end = segments[at]
            if number < start:
                continue
            packet.pts = self._pts[number]
            if self._skip_safe and wanted is not None and not self._surveyed:
                context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            last = number + 1 == end
            for frame in self._frames_of(context, packet, drain=last):
                if begins and not _is_key(frame):
                    return
                begins = False
                self.num_decoded += 1
                self.sound = self.sound and not frame.is_corrupt
                yield frame
            if last:
                context.flush_buffers()
                at, begins = at + 1, True
                if at == len(segments):
                    return

    def _frames_of(self, context: Any, packet: Any, *, drain: bool) -> Iterator[Any]:
        """Yield a decoder's frames for a packet; drain it before packets are skipped."""
        for each in (packet, None) if drain else (packet,):
            try:
                frames = context.decode(each)
            except av.FFmpegError as error:
                if isinstance(error, MemoryError):
                    raise MemoryError from None
                self.sound = False
                continue
            yield from frames

    def _to_rgb(self, frame: Any) -> Pixels:
        converter = self._converter
        return upright(frame, self._aspect, self._limits, converter=converter)


def _is_key(frame: Any) -> bool:
    """Return True for a frame without a reference to any other."""
    return bool(frame.key_frame) or frame.pict_type == PictureType.I


def _decoder(stream: Any, *, threads: bool) -> Any:
    """Return a decoder for a stream. With threads, damage may look different each time.

    A WebM file keeps transparency as a second picture beside each frame; libvpx alone reads it.
    """
    context = stream.codec_context
    with_alpha = _WITH_ALPHA.get(context.name) if stream.metadata.get("alpha_mode") == "1" else None
    if with_alpha in av.codecs_available:
        context = av.CodecContext.create(with_alpha, "r")
    context.thread_type = "AUTO"
    context.thread_count = min(4, os.cpu_count() or 1) if threads else 1
    return context


class Reader:
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


def _readable_part(data: memoryview) -> memoryview:
    """Return a file without the incomplete head of a last fragment.

    FFmpeg gives up on the whole of a fragmented MP4 with a cut last `moof` box. A recording in
    progress ends like that. Its last `mdat` box may be cut anywhere.
    """
    end = len(data)
    for kind, start, size in _boxes(data):
        if kind == _FRAGMENT and start + size > end:
            return data[:start]
    return data


def _lacks_index(data: memoryview) -> bool:
    """Return True for an MP4 without a whole `moov` box, so that nothing can be read."""
    boxes = {kind: start + size <= len(data) for kind, start, size in _boxes(data)}
    return b"ftyp" in boxes and not boxes.get(b"moov", False)


def _boxes(data: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, size) of the top-level boxes of an MP4; nothing for other files."""
    at = 0
    while at + _HEAD.size <= len(data):
        size, kind = _HEAD.unpack_from(data, at)
        if at == 0 and kind not in (b"ftyp", b"styp", b"moov", b"mdat", b"free", b"wide", b"skip"):
            return
        if size == 1 and at + _LONG_HEAD <= len(data):
            size = _LONG.unpack_from(data, at + _HEAD.size)[0]
        elif size == 0:
            size = len(data) - at
        if size < _HEAD.size:
            return
        yield kind, at, size
        at += size


def upright(
    frame: Any,
    aspect: Fraction | None,
    limits: MediaLimits,
    *,
    converter: VideoReformatter,
) -> Pixels:
    """Return a frame as players show it.

    Non-square pixels are stretched horizontally, transparency is composed over white, and the
    container's display matrix turns and mirrors.

    Args:
        frame: `av.VideoFrame`.
        aspect: width over height of a pixel; None: square.
        converter: one for all frames of a video. A frame's own would start threads for each frame,
            and these live as long as the video.

    Returns:
        uint8 `[height, width, 3]`, C-contiguous.

    Raises MediaError for frames over the pixel limit.
    """
    width = _shown_width(frame, aspect)
    if max(width, frame.width) * frame.height > limits.max_video_pixels:
        raise MediaError(f"the video is over {limits.max_video_pixels} pixels")
    alpha = _has_alpha(frame)
    pixels: Any = converter.reformat(frame, format="rgba" if alpha else "rgb24").to_ndarray()
    if alpha:
        pixels = _over_white(pixels)
    return np.ascontiguousarray(_turned(stretched(pixels, width), _matrix(frame)))


def _shown_width(frame: Any, aspect: Fraction | None) -> int:
    """Return the width of a frame with square pixels, in pixels."""
    if not aspect or not Fraction(1, MAX_PIXEL_ASPECT) <= aspect <= MAX_PIXEL_ASPECT:
        return int(frame.width)
    return max(1, int(frame.width * aspect))


def stretched(pixels: Pixels, width: int) -> Pixels:
    """Return a picture of another width, in pixels; by Pillow, with the same bits anywhere."""
    if width == pixels.shape[1]:
        return pixels
    picture = PIL.Image.fromarray(pixels)
    resized = picture.resize((width, picture.height), PIL.Image.Resampling.BICUBIC)
    return np.asarray(resized)


def _has_alpha(frame: Any) -> bool:
    return any(component.is_alpha for component in frame.format.components)


def _over_white(rgba: Pixels) -> Pixels:
    pixels = rgba.astype(np.float32)
    share = pixels[:, :, 3:] / _WHITE
    composed: Pixels = np.rint(pixels[:, :, :3] * share + _WHITE * (1 - share)).astype(np.uint8)
    return composed


def _matrix(frame: Any) -> tuple[int, int, int, int] | None:
    """Return (a, b, c, d) of a frame's display matrix, None if it has none.

    A pixel at (x, y) is shown at (a x + c y, b x + d y), with y pointing down.
    """
    # A frame and its `side_data` refer to each other, so shown frames would pile up.
    container: Any = SideDataContainer
    data = container(frame).get(Type.DISPLAYMATRIX)
    if data is None:
        return None
    raw = bytes(data)
    if len(raw) != _MATRIX.size:
        return None
    a, b, _, c, d, *_ = _MATRIX.unpack(raw)
    return a, b, c, d


def _turned(pixels: Pixels, matrix: tuple[int, int, int, int] | None) -> Pixels:
    """Apply the nearest of the eight turns and mirrorings."""
    if matrix is None:
        return pixels
    a, b, c, d = matrix
    if abs(b) + abs(c) > abs(a) + abs(d):
        # What was a column becomes a row.
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    if a < 0:
        pixels = pixels[:, ::-1]
    if d < 0:
        pixels = pixels[::-1]
    return pixels
