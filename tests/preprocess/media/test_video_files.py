"""Videos as browsers, phones, cameras and recorders write them."""

from __future__ import annotations

import gc
import io
import shutil
import struct
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.videos import EncodedVideo

LIMITS = MediaLimits()
MS = Fraction(1, 1000)
Picture = npt.NDArray[np.uint8]


def numbered(number: int, height: int = 48, width: int = 64) -> Picture:
    """A picture of a number: eight bars are its bits."""
    bars = [255 * (number >> bit & 1) for bit in range(8)]
    row = np.repeat(np.array(bars, dtype=np.uint8), width // 8)
    return np.broadcast_to(row[None, :, None], (height, width, 3)).copy()


def number_of(picture: Picture) -> int:
    height, width = picture.shape[:2]
    bars = picture[height // 2, width // 16 :: width // 8, 0] > 127
    return sum(int(bar) << bit for bit, bar in enumerate(bars))


def corners() -> Picture:
    """Red and green above blue and white."""
    picture = np.zeros((48, 64, 3), dtype=np.uint8)
    picture[:24, :32, 0] = picture[:24, 32:, 1] = picture[24:, :32, 2] = 255
    picture[24:, 32:] = 255
    return picture


def corners_of(picture: Picture) -> str:
    height, width = picture.shape[:2]
    names = {(1, 0, 0): "R", (0, 1, 0): "G", (0, 0, 1): "B", (1, 1, 1): "W"}
    points = [(y, x) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    return "".join(names[tuple(int(value > 127) for value in picture[point])] for point in points)  # type: ignore[index]


def record(
    pictures: list[Picture],
    container: str = "mp4",
    codec: str = "libx264",
    *,
    times: list[int] | None = None,
    rate: int = 30,
    options: dict[str, str] | None = None,
    pixel_format: str = "yuv420p",
    aspect: Fraction | None = None,
    source_format: str = "rgb24",
) -> bytes:
    """A file of frames `1 / rate` seconds apart, or at `times` in milliseconds."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=options or {}) as output:
        extra = {"g": "15", "crf": "18"} if "264" in codec else {}
        stream: Any = output.add_stream(codec, rate=rate, options=extra)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = pixel_format
        if times is not None:
            stream.codec_context.time_base = MS
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        for index, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format=source_format)
            if times is not None:
                frame.pts, frame.time_base = times[index], MS
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def numbers(video: EncodedVideo) -> list[int]:
    return [number_of(each) for each in video.frames(range(len(video.times)))]


def without_rate(webm: bytes) -> bytes:
    """What a browser's recorder writes: no DefaultDuration, no Duration."""
    for element in (b"\x23\xe3\x83", b"\x44\x89"):
        at = webm.find(element)
        while at >= 0:
            size = webm[at + len(element)] & 0x7F
            if size in (4, 8):
                length = len(element) + 1 + size
                void = b"\xec" + bytes([0x80 | length - 2]) + bytes(length - 2)
                webm = webm[:at] + void + webm[at + length :]
            at = webm.find(element, at + 1)
    return webm


# Times


def test_a_recording_of_a_browser_has_the_rate_of_its_times() -> None:
    random = np.random.default_rng(0)
    times = np.cumsum(random.integers(40, 92, 60)).tolist()
    data = without_rate(
        record([numbered(n) for n in range(60)], "webm", "libvpx", times=times, rate=1000)
    )
    video = EncodedVideo(data, None, LIMITS)
    seconds = (times[-1] - times[0]) / 1000
    assert video.fps == pytest.approx(59 / seconds, rel=1e-3)
    assert video.times[-1] == pytest.approx(seconds, abs=0.002) and not video.steady


@pytest.mark.parametrize("container", ["matroska", "mp4"])
def test_a_rate_that_the_times_deny_is_not_believed(container: str) -> None:
    times = [33 * n for n in range(30)] + [990 + 93 * n for n in range(1, 31)]
    data = record([numbered(n) for n in range(60)], container, times=times)
    video = EncodedVideo(data, None, LIMITS)
    assert video.fps == pytest.approx(59 / (times[-1] / 1000), rel=0.01)
    assert not video.steady and video.times[-1] == pytest.approx(times[-1] / 1000, abs=0.002)


@pytest.mark.parametrize("first", [5000, -2000])
def test_times_count_from_the_first_frame(first: int) -> None:
    times = [first + 33 * n for n in range(30)]
    data = record([numbered(n) for n in range(30)], "matroska", times=times)
    video = EncodedVideo(data, None, LIMITS)
    assert video.times[0] == 0 and video.times[-1] == pytest.approx(0.957, abs=0.002)


@pytest.mark.parametrize(("rate", "container"), [(1, "mp4"), (240, "matroska"), (25, "mpegts")])
def test_a_rate_that_the_times_confirm_is_exact(rate: int, container: str) -> None:
    data = record([numbered(n) for n in range(20)], container, rate=rate)
    video = EncodedVideo(data, None, LIMITS)
    assert video.fps == rate and video.steady


def test_the_limit_of_length_counts_measured_seconds() -> None:
    times = [500 * n for n in range(20)]
    data = without_rate(
        record([numbered(n) for n in range(20)], "webm", "libvpx", times=times, rate=1000)
    )
    with pytest.raises(MediaError, match="over 5 seconds"):
        EncodedVideo(data, None, MediaLimits(max_video_seconds=5.0))


def stream_of(first: int, last: int, start: int) -> bytes:
    times = [start + round(1000 * n / 30) for n in range(last - first)]
    return record([numbered(n) for n in range(first, last)], "mpegts", times=times)


@pytest.mark.parametrize("start", [0, 17, 517, 1000, 5000, 36_000_000])
def test_streams_one_behind_the_other_are_one_video(start: int) -> None:
    """`cat a.ts b.ts`: the second clock may begin anywhere."""
    video = EncodedVideo(stream_of(0, 30, 0) + stream_of(30, 60, start), None, LIMITS)
    assert numbers(video) == list(range(60))
    pause = 4.0 if start == 5000 else 0.0
    assert video.times[-1] == pytest.approx(59 / 30 + pause, abs=0.1)
    assert list(video.frames([31, 45]))[1].shape == (48, 64, 3)


# Turns and shapes

TURNS = [
    ((1, 0, 0, 1), "RGBW"),
    ((0, 1, -1, 0), "BRWG"),
    ((-1, 0, 0, -1), "WBGR"),
    ((0, -1, 1, 0), "GWRB"),
    ((-1, 0, 0, 1), "GRWB"),
    ((1, 0, 0, -1), "BWRG"),
    ((0, 1, 1, 0), "RBGW"),
    ((0, -1, -1, 0), "WGBR"),
]


def turned(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 file with another display matrix."""
    a, b, c, d = (value << 16 for value in matrix)
    at = data.index(struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30))
    packed = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    track = data.index(packed[-4:], data.index(b"tkhd"))
    at = data.rindex(struct.pack(">i", 1 << 16), data.index(b"tkhd"), track) - 16
    return data[:at] + packed + data[at + len(packed) :]


@pytest.mark.parametrize(("matrix", "expected"), TURNS)
def test_all_eight_orientations(
    matrix: tuple[int, int, int, int], expected: str, tmp_path: Path
) -> None:
    data = turned(record([corners()] * 3), matrix)
    (picture,) = EncodedVideo(data, None, LIMITS).frames([1])
    assert corners_of(picture) == expected
    if shutil.which("ffmpeg"):
        path = tmp_path / "turned.mp4"
        path.write_bytes(data)
        command = ["ffmpeg", "-v", "error", "-i", str(path), "-frames:v", "1"]
        output = [*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
        pixels = subprocess.run(output, capture_output=True, check=True).stdout
        assert corners_of(np.frombuffer(pixels, np.uint8).reshape(picture.shape)) == expected


def test_pixels_that_are_not_square_are_stretched() -> None:
    data = record([corners()] * 3, aspect=Fraction(64, 45))
    (picture,) = EncodedVideo(data, None, LIMITS).frames([0])
    assert picture.shape == (48, 91, 3) and corners_of(picture) == "RGBW"


def test_a_shape_that_cannot_be_is_ignored() -> None:
    data = record([corners()] * 3, aspect=Fraction(1, 64))
    (picture,) = EncodedVideo(data, None, LIMITS).frames([0])
    assert picture.shape == (48, 64, 3)


def test_stretched_frames_count_against_the_limit() -> None:
    data = record([corners()] * 3, aspect=Fraction(4, 1))
    video = EncodedVideo(data, None, MediaLimits(max_video_pixels=64 * 48))
    with pytest.raises(MediaError, match="pixels"):
        list(video.frames([0]))


def test_transparency_lies_over_white() -> None:
    if "libvpx-vp9" not in av.codecs_available:
        pytest.skip("this build of PyAV has no libvpx")
    picture = np.zeros((48, 64, 4), dtype=np.uint8)
    picture[:, :32] = (255, 0, 0, 255)
    picture[:, 32:, 1] = 255  # green that nobody sees
    data = record(
        [picture] * 5, "webm", "libvpx-vp9", pixel_format="yuva420p", source_format="rgba"
    )
    (shown,) = EncodedVideo(data, None, LIMITS).frames([2])
    assert np.abs(shown[24, 10].astype(int) - (255, 0, 0)).max() < 8
    assert shown[24, 55].tolist() == [255, 255, 255]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_shown_frames_leave_no_threads_and_no_memory() -> None:
    """Otherwise a minute of a screen recording is over the memory of a decoder."""
    video = EncodedVideo(record([numbered(n) for n in range(80)]), None, LIMITS)
    gc.collect()
    gc.disable()
    try:
        left = []
        for index, _ in enumerate(video.frames(range(80))):
            if index in (20, 79):
                living = sum(type(each) is av.VideoFrame for each in gc.get_objects())
                status = Path("/proc/self/status").read_text(encoding="ascii")
                left.append((int(status.split("Threads:")[1].split()[0]), living))
    finally:
        gc.enable()
    (threads, _), (threads_later, living) = left
    assert threads_later <= threads + 4 and living <= 12


# Files that end anywhere

RECORDERS: list[tuple[str, dict[str, str]]] = [
    ("mp4", {"movflags": "frag_keyframe+empty_moov+default_base_moof"}),
    ("mpegts", {}),
    ("matroska", {"live": "1"}),
]


@pytest.mark.parametrize(("container", "options"), RECORDERS)
def test_a_recording_in_progress_gives_what_is_there(
    container: str, options: dict[str, str]
) -> None:
    """Cut at 40 places: never fewer frames than before, and each is that of the whole file."""
    pictures = [numbered(n) for n in range(60)]
    data = record(pictures, container, options=options)
    whole = EncodedVideo(data, None, LIMITS)
    known = dict(zip(np.round(whole.times, 3).tolist(), numbers(whole), strict=True))
    assert not whole.cut_short and len(known) == 60
    seen = 0
    for end in np.linspace(len(data) // 3, len(data), 40).astype(int).tolist():
        try:
            video = EncodedVideo(data[:end], None, LIMITS)
        except MediaError as error:
            assert not seen and "no frames" in error.message
            continue
        found = zip(np.round(video.times, 3).tolist(), numbers(video), strict=True)
        # The last picture of a stream without lengths may be there in part.
        kept = list(found)[: -1 if container == "mpegts" else None]
        assert all(known[time] == number for time, number in kept)
        assert len(video.times) >= seen
        seen = len(video.times)
    assert seen == 60


def test_a_fragment_that_is_cut_is_said_to_be() -> None:
    data = record([numbered(n) for n in range(60)], options=RECORDERS[0][1])
    last = data.rindex(b"moof") - 4
    for end, short in ((last, False), (last + 20, True), (len(data) - 200, True)):
        assert EncodedVideo(data[:end], None, LIMITS).cut_short == short, end


def test_a_download_that_broke_off_gives_its_beginning(tmp_path: Path) -> None:
    """Of a file whose index stands before the pictures."""
    plain = record([numbered(n) for n in range(60)])
    path = tmp_path / "first.mp4"
    options = {"movflags": "faststart"}
    with av.open(io.BytesIO(plain)) as source, av.open(str(path), "w", options=options) as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                output.mux(packet)
    data = path.read_bytes()
    video = EncodedVideo(data[: len(data) * 8 // 10], None, LIMITS)
    assert video.cut_short and 20 < len(video.times) < 60
    # A frame behind the last ones in the file may be shown before them.
    shown = numbers(video)
    assert shown[:-3] == list(range(len(shown) - 3)) and shown == sorted(shown)
    assert [round(time * 30) for time in video.times] == shown


def test_a_file_without_its_index_is_told_from_others() -> None:
    data = record([numbered(n) for n in range(60)])
    for end in (data.index(b"moov") - 4, data.index(b"moov") + 60):
        with pytest.raises(MediaError, match="no index"):
            EncodedVideo(data[:end], None, LIMITS)


@pytest.mark.parametrize(
    ("container", "codec"),
    [("flv", "flv"), ("asf", "wmv2"), ("mpeg", "mpeg2video"), ("mpeg", "mpeg1video")],
)
def test_further_containers(container: str, codec: str) -> None:
    data = record([numbered(n) for n in range(40)], container, codec, rate=25)
    video = EncodedVideo(data, None, LIMITS)
    assert numbers(video) == list(range(40))
    assert video.fps == pytest.approx(25, rel=0.02)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"<!DOCTYPE html><html>Please sign in</html>", "an HTML page, perhaps to log in"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS"),
        (b'{"error": "not found"}', "a JSON text"),
        (b"%PDF-1.7", "a PDF document"),
        (b"RIFF\0\0\0\0WAVEfmt ", "a WAV sound"),
        (b"not found\n", "a text"),
    ],
)
def test_what_is_no_video_is_named(data: bytes, kind: str) -> None:
    with pytest.raises(MediaError, match=f"supported format .*WebM.*: it is .*{kind}"):
        EncodedVideo(data, None, LIMITS)
