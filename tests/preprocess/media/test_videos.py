"""Videos: which frames come out, from which files, and what is refused."""

from __future__ import annotations

import io
import itertools
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
import torch
from media_reference import square_pixels
from PIL import Image

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.frames import ArrayVideo
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.videos import EncodedVideo

LIMITS = MediaLimits()
CLIPS = ("bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4")
Frames = list[npt.NDArray[np.uint8]]


def decode_all(data: bytes) -> Frames:
    """Every frame, in one go, as transformers' PyAV reader converts them, with square pixels."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return list(square_pixels(frames, io.BytesIO(data)))


def moving_square(num_frames: int, height: int = 48, width: int = 64) -> Frames:
    frames = []
    for index in range(num_frames):
        frame = np.full((height, width, 3), (index * 5) % 200, dtype=np.uint8)
        frame[8:24, (index * 3) % (width - 16) :][:, :16] = (250, 40, 90)
        frames.append(frame)
    return frames


def encode(frames: Frames, container: str = "mp4", codec: str = "libx264", **options: str) -> bytes:
    """A file of ten frames a second."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=10, options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def assert_frames(data: bytes, indices: list[int], expected: Frames | None = None) -> None:
    expected = decode_all(data) if expected is None else expected
    video = EncodedVideo(data, None, LIMITS)
    assert len(video.times) == len(expected)
    found = list(video.frames(indices))
    assert len(found) == len(indices)
    for index, frame in zip(indices, found, strict=True):
        assert np.array_equal(frame, expected[index]), index


@pytest.mark.parametrize("name", CLIPS)
def test_real_clips_give_exactly_the_frames_asked_for(name: str, videos: Path) -> None:
    data = (videos / name).read_bytes()
    expected = decode_all(data)
    last = len(expected) - 1
    random = np.random.default_rng(0)
    for indices in (
        [0],
        [last],
        [5, 5, 70],
        np.linspace(0, last, 12).round().astype(int).tolist(),
        sorted(random.choice(last, 30, replace=False).tolist()),
    ):
        assert_frames(data, indices, expected)


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "libx264", {"bf": "3", "g": "12", "b-pyramid": "normal"}),
        ("mp4", "libx264", {"bf": "2", "g": "15", "x264-params": "open-gop=1"}),
        ("mov", "libx264", {"bf": "0", "g": "250"}),
        ("mp4", "libx265", {"x265-params": "bframes=3:keyint=12:log-level=none"}),
        ("mp4", "mpeg4", {"bf": "2", "g": "12"}),
        ("matroska", "libx264", {"bf": "3", "g": "12"}),
        ("webm", "libvpx", {"g": "12"}),
        ("webm", "libvpx-vp9", {"g": "12"}),
        ("avi", "mpeg4", {"bf": "0", "g": "12"}),
        ("mpegts", "libx264", {"bf": "2", "g": "12"}),
        ("mpegts", "mpeg2video", {"bf": "2", "g": "12"}),
    ],
)
def test_containers_and_codecs(container: str, codec: str, options: dict[str, str]) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"this build of PyAV cannot encode {codec}")
    data = encode(moving_square(50), container, codec, **options)
    expected = decode_all(data)
    assert len(expected) == 50
    for indices in ([0, 20, 49], [13], [11, 12, 13, 35, 36], list(range(50))):
        assert_frames(data, indices, expected)


def test_every_subset_of_a_short_clip_with_b_frames() -> None:
    data = encode(moving_square(9), bf="3", g="4")
    expected = decode_all(data)
    for size in (1, 2, 3, 9):
        for indices in itertools.combinations(range(9), size):
            assert_frames(data, list(indices), expected)


def test_only_needed_packets_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(moving_square(100), g="10", bf="0", sc_threshold="0")
    video = EncodedVideo(data, None, LIMITS)
    decoded = 0
    to_rgb = EncodedVideo._to_rgb

    def counting(self: EncodedVideo, frame: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return to_rgb(self, frame)

    monkeypatch.setattr(EncodedVideo, "_to_rgb", counting)
    assert len(list(video.frames([5, 55]))) == 2
    assert decoded == 2  # only wanted frames are converted
    assert video._segments([video._shown[5], video._shown[55]]) == [(0, 6), (50, 56)]


def test_times_and_rate(videos: Path) -> None:
    video = EncodedVideo((videos / "bikes.mp4").read_bytes(), None, LIMITS)
    assert video.fps == 25.0
    assert np.allclose(video.times, np.arange(250) / 25)
    slower = EncodedVideo((videos / "bikes.mp4").read_bytes(), 5.0, LIMITS)
    assert slower.fps == 5.0
    assert np.allclose(slower.times, np.arange(250) / 5)


def test_times_start_at_the_first_frame_in_a_transport_stream() -> None:
    video = EncodedVideo(encode(moving_square(20), "mpegts", bf="2"), None, LIMITS)
    assert np.allclose(video.times, np.arange(20) / 10, atol=1e-3)


@pytest.mark.parametrize(
    ("turn", "matrix"),
    [
        (-1, (0, 1, -1, 0)),  # what a phone held upright writes: clockwise
        (2, (-1, 0, 0, -1)),
        (1, (0, -1, 1, 0)),
    ],
)
def test_rotation_of_the_container_is_applied(turn: int, matrix: tuple[int, int, int, int]) -> None:
    data = encode(moving_square(5))
    one, identity = (
        1 << 16,
        b"".join(value.to_bytes(4, "big", signed=True) for value in (1 << 16, 0, 0, 0, 1 << 16, 0)),
    )
    a, b, c, d = (value * one for value in matrix)
    turned = b"".join(value.to_bytes(4, "big", signed=True) for value in (a, b, 0, c, d, 0))
    track = data.index(b"tkhd")
    at = data.index(identity, track)
    assert at < track + 60
    rotated = data[:at] + turned + data[at + len(turned) :]
    expected = [np.rot90(frame, turn) for frame in decode_all(data)]
    assert_frames(rotated, [0, 4], expected)


def test_frames_in_arrays() -> None:
    frames = np.stack(moving_square(6))
    video = ArrayVideo(frames, None, LIMITS)
    assert (video.fps, len(video.times)) == (24.0, 6)
    assert np.array_equal(np.stack(list(video.frames([1, 1, 4]))), frames[[1, 1, 4]])
    pictures = [Image.fromarray(frame) for frame in frames]
    frames.flags.writeable = False
    mirrored = frames[:, :, ::-1].copy()[:, :, ::-1]
    for other in (pictures, tuple(pictures), list(frames), mirrored, torch.tensor(frames.copy())):
        found = list(ArrayVideo(other, 2.0, LIMITS).frames(range(6)))
        assert np.array_equal(np.stack(found), frames)
        assert all(frame.flags.writeable and frame.flags.c_contiguous for frame in found)
    assert ArrayVideo(pictures, 2.0, LIMITS).times == [0, 0.5, 1, 1.5, 2, 2.5]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        "text",
        np.zeros((0, 8, 8, 3), dtype=np.uint8),
        np.zeros((2, 0, 8, 3), dtype=np.uint8),
        np.zeros((2, 8, 8, 3), dtype=np.float32),
        np.zeros((2, 8, 8, 4), dtype=np.uint8),
        np.zeros((8, 8, 3), dtype=np.uint8),
        [np.zeros((8, 8, 3), dtype=np.uint8), np.zeros((8, 9, 3), dtype=np.uint8)],
        [1, 2],
        None,
    ],
)
def test_other_arrays_are_media_errors(frames: Any) -> None:
    with pytest.raises(MediaError):
        ArrayVideo(frames, None, LIMITS)


def sound_only() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream: Any = output.add_stream("aac", rate=8000)
        samples = np.zeros((1, 1024), dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        frame.rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def test_broken_files_are_media_errors(videos: Path) -> None:
    whole = (videos / "bikes.mp4").read_bytes()
    for data in (
        b"",
        b"\0" * 4096,
        whole[:1000],
        whole[:-20_000] if b"moov" not in whole[:-20_000] else whole[:2000],
        b"GIF89a" + bytes(100),
        sound_only(),
        encode(moving_square(1))[:400],
    ):
        with pytest.raises(MediaError):
            EncodedVideo(data, None, LIMITS)


def test_lost_frames_are_media_errors() -> None:
    """A file whose index is whole but whose second half was lost, as broken downloads leave it."""
    random = np.random.default_rng(0)
    noise = [random.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(30)]
    data = bytearray(encode(noise, g="30"))
    half, end = len(data) // 2, data.index(b"moov")
    data[half : end - 4] = bytes(end - 4 - half)
    video = EncodedVideo(bytes(data), None, LIMITS)
    assert len(video.times) == 30
    with pytest.raises(MediaError, match="damaged"):
        list(video.frames([0, 29]))


def test_a_video_without_frames_is_a_media_error() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream: Any = output.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        output.start_encoding()
    with pytest.raises(MediaError):
        EncodedVideo(buffer.getvalue(), None, LIMITS)


def test_limits() -> None:
    data = encode(moving_square(30))
    for bound, word in (
        ({"max_video_frames": 29}, "29 frames"),
        ({"max_video_seconds": 2.9}, "2.9 seconds"),
        ({"max_video_pixels": 48 * 64 - 1}, "pixels"),
        ({"max_video_bytes": len(data) - 1}, "bytes"),
        ({"max_decode_seconds": -1.0}, "longer"),
    ):
        with pytest.raises(MediaError, match=word):
            EncodedVideo(data, None, replace(LIMITS, **bound))
        if "bytes" not in word and "longer" not in word:
            with pytest.raises(MediaError, match=word):
                ArrayVideo(np.stack(moving_square(30)), 10.0, replace(LIMITS, **bound))
    EncodedVideo(data, None, replace(LIMITS, max_video_frames=30, max_video_seconds=3.0))


def test_playlists_and_scripts_open_nothing(tmp_path: Path) -> None:
    """Formats that name other files or ports are not even tried."""
    (tmp_path / "secret.mp4").write_bytes(encode(moving_square(5)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scripts = (
        f"ffconcat version 1.0\nfile {tmp_path}/secret.mp4\n",
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{tmp_path}/secret.mp4\n"
        "#EXT-X-ENDLIST\n",
        f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
        f"m=video {port} RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    )
    for script in scripts:
        with pytest.raises(MediaError, match="not a video"):
            EncodedVideo(script.encode(), None, LIMITS)


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("matroska", "mpeg4")])
def test_flipped_bytes_give_frames_or_media_errors(container: str, codec: str) -> None:
    whole = encode(moving_square(8), container, codec)
    random = np.random.default_rng(0)
    outcomes = set()
    for _ in range(150):
        data = bytearray(whole)
        for at in random.integers(0, len(data), random.integers(1, 20)):
            data[at] = random.integers(0, 256)
        try:
            video = EncodedVideo(bytes(data), None, LIMITS)
            outcomes.add(len(list(video.frames([0, len(video.times) - 1]))))
        except MediaError:
            outcomes.add(0)
    assert outcomes == {0, 2}
