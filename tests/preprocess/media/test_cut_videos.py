"""Videos that begin between key frames, and videos with damage in the middle."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest

import vlm_serve
from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.limits import LostFramesError, MediaLimits
from vlm_serve.preprocess.media.videos import EncodedVideo, _is_key
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.system.stopping import Stop

LIMITS = MediaLimits()
ROOT = bytes(32)
COUNT = 60
Picture = npt.NDArray[np.uint8]

CODECS: dict[str, tuple[str, dict[str, str]]] = {
    "H.264": ("libx264", {"g": "15"}),
    "H.264, open": ("libx264", {"g": "15", "x264-params": "open-gop=1:bframes=3:scenecut=0"}),
    "H.264, refreshed": ("libx264", {"x264-params": "intra-refresh=1:keyint=20"}),
    "HEVC": ("libx265", {"x265-params": "keyint=15:log-level=none"}),
    "MPEG-2": ("mpeg2video", {"g": "15", "bf": "2"}),
    "MPEG-4": ("mpeg4", {"g": "15", "bf": "2"}),
    "VP9": ("libvpx-vp9", {"g": "15"}),
    "WMV": ("wmv2", {"g": "15"}),
}


def numbered(number: int) -> Picture:
    """A picture of a number in eight bars, over a little noise."""
    bars = [175 * (number >> bit & 1) for bit in range(8)]
    row = np.repeat(np.array(bars, dtype=np.uint8), 8)
    noise = np.random.default_rng(number).integers(0, 80, (48, 64, 3), dtype=np.uint8)
    return np.asarray(row[None, :, None] + noise, dtype=np.uint8)


def record(name: str, container: str) -> bytes:
    codec, options = CODECS[name]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=30, options=options)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for number in range(COUNT):
            frame = av.VideoFrame.from_ndarray(numbered(number), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def without_first(data: bytes, container: str, count: int = 7) -> bytes:
    """Write what `ffmpeg -c copy` does that began behind so many frames."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format=container) as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.size and number >= count:
                packet.stream = stream
                output.mux(packet)
    return buffer.getvalue()


def plain(data: bytes) -> list[Picture]:
    """Return what a decoder gives that goes on after errors, from the first key frame on."""
    found: list[Picture] = []
    with av.open(io.BytesIO(data)) as source:
        context = source.streams.video[0].codec_context
        context.thread_count = 1
        for packet in source.demux(video=0):
            try:
                frames = context.decode(packet if packet.size else None)
            except av.FFmpegError:
                continue
            for frame in frames:
                if found or _is_key(frame):
                    found.append(frame.to_ndarray(format="rgb24"))
    return found


def check(data: bytes, expected: list[Picture], *, survey: bool) -> EncodedVideo:
    video = EncodedVideo(data, None, LIMITS, survey=survey)
    assert len(video.times) == len(expected) and video.times[0] == 0
    for indices in (range(len(expected)), range(3, len(expected), 7)):
        shown = list(video.frames(list(indices)))
        assert all(np.array_equal(shown[at], expected[index]) for at, index in enumerate(indices))
    return video


CUT = [
    *(("H.264", form) for form in ("mp4", "matroska", "flv", "mpegts")),
    *((name, form) for name in ("HEVC", "MPEG-2", "MPEG-4") for form in ("mp4", "matroska")),
    *((name, "mpegts") for name in ("H.264, open", "H.264, refreshed", "HEVC", "MPEG-4")),
    ("VP9", "webm"),
    ("WMV", "asf"),
]


@pytest.mark.parametrize(("name", "container"), CUT)
def test_a_piece_begins_at_its_first_key_frame(name: str, container: str) -> None:
    data = without_first(record(name, container), container)
    expected = plain(data)
    assert 20 < len(expected) < COUNT - 7 + 1
    for survey in (False, True):
        video = check(data, expected, survey=survey)
        assert video.cut_short
        if container != "asf":
            assert video.fps == pytest.approx(30, rel=1e-3) and not video.sound


@pytest.mark.parametrize("name", ["H.264", "H.264, open", "HEVC", "MPEG-2"])
def test_a_stream_may_be_cut_at_any_byte(name: str) -> None:
    data = record(name, "mpegts")
    whole = plain(data)
    short = 0
    for start in np.linspace(400, len(data) // 2, 12).astype(int).tolist():
        piece = data[start:]
        expected = plain(piece)
        video = check(piece, expected, survey=False)
        short += video.cut_short
        assert all(map(np.array_equal, expected[::-1], whole[::-1]))
    assert short > 6  # others begin with a whole key frame


def test_a_whole_file_with_marks_that_lie_keeps_its_beginning() -> None:
    """The first frame is not said to be a key frame, but is one."""
    data, buffer = record("H.264", "matroska"), io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.size:
                packet.is_keyframe, packet.stream = number == 30, stream
                output.mux(packet)
    video = check(buffer.getvalue(), plain(data), survey=False)
    assert len(video.times) == COUNT and not video.cut_short


def damaged(data: bytes, kind: str) -> bytes:
    """The file with its middle third harmed, but neither its head nor its index."""
    random = np.random.default_rng(1)
    harmed, third = bytearray(data), len(data) // 3
    if kind == "flipped":
        for at in random.integers(third, 2 * third, 40).tolist():
            harmed[at] ^= int(random.integers(1, 256))
    elif kind == "zeros":
        harmed[third : third + third // 2] = bytes(third // 2)
    else:  # packets that a network has lost
        lost = [at for at in range(third // 188, 2 * third // 188) if random.random() < 0.2]
        for at in reversed(lost):
            del harmed[at * 188 : (at + 1) * 188]
    return bytes(harmed)


HARM = [
    *(("H.264", form, "flipped") for form in ("mp4", "matroska", "mpegts")),
    *(("H.264", form, "zeros") for form in ("mp4", "mpegts", "flv")),
    *((name, "mpegts", "lost") for name in ("H.264", "HEVC", "MPEG-2", "MPEG-4")),
    ("HEVC", "mp4", "zeros"),
    ("VP9", "webm", "zeros"),
    ("VP9", "webm", "flipped"),
]


@pytest.mark.parametrize(("name", "container", "kind"), HARM)
def test_damage_in_the_middle_leaves_the_rest(name: str, container: str, kind: str) -> None:
    data = damaged(record(name, container), kind)
    expected = plain(data)
    video = EncodedVideo(data, None, LIMITS, survey=True)
    assert 10 < len(video.times) <= len(expected)
    shown = list(video.frames(range(len(video.times))))
    again = EncodedVideo(data, None, LIMITS, survey=True)
    some = list(range(1, len(shown), 5))
    assert all(
        np.array_equal(shown[at], one) for at, one in zip(some, again.frames(some), strict=True)
    )
    left = iter(expected)  # the frames are those, in order; a clock that leapt leaves some out
    assert all(any(np.array_equal(one, other) for other in left) for one in shown)
    assert len(shown) >= len(expected) - 3


@pytest.fixture(scope="module")
def preprocessor() -> Iterator[Preprocessor]:
    demo = Path(vlm_serve.__file__).parent / "demo" / "dense"
    made = Preprocessor(demo, block_size=16, root_key=lambda salt: ROOT)
    yield made
    made.close()


def asked(made: Preprocessor, data: bytes | Picture, **options: Any) -> Any:
    part = {"type": "video", "video": data, **options}
    return made.prepare([{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}])


def test_what_decodes_is_shown_and_counted(preprocessor: Preprocessor) -> None:
    whole = record("H.264", "mp4")
    data = damaged(whole, "zeros")
    with pytest.raises(LostFramesError):
        list(EncodedVideo(data, None, LIMITS).frames(range(COUNT)))
    prompt = asked(preprocessor, data, num_frames=8)
    (medium,) = prompt.media
    assert medium.cut_short and medium.grid[0] == 4
    video = EncodedVideo(data, None, LIMITS, survey=True)
    frames = np.stack(list(video.frames(range(len(video.times)))))
    same = asked(preprocessor, frames, num_frames=8, fps=video.fps)
    assert [span.content_hash for span in same.spans] == [
        span.content_hash for span in prompt.spans
    ]
    again = asked(preprocessor, data, num_frames=8)
    assert again.media[0].cut_short and again.token_ids == prompt.token_ids
    medium.load(Stop())
    assert not asked(preprocessor, whole, num_frames=8).media[0].cut_short


def test_a_stream_that_was_joined_late_grows(preprocessor: Preprocessor) -> None:
    """The longer recording keeps the patches of the shorter one on the grid."""
    data = record("H.264", "mpegts")[188 * 20 + 50 :]
    grid = {"sampling": "fps_grid", "sample_fps": 10, "max_frame_pixels": 4096}
    hashes = []
    for end in (len(data) * 2 // 3, len(data)):
        prompt = asked(preprocessor, data[:end], **grid)
        assert prompt.media[0].cut_short
        hashes.append([span.content_hash for span in prompt.spans])
    shorter, longer = hashes
    assert 2 <= len(shorter) < len(longer) and longer[: len(shorter) - 1] == shorter[:-1]


def test_a_video_without_any_frame_that_decodes_is_refused(preprocessor: Preprocessor) -> None:
    data = record("H.264", "mp4")
    start, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    with pytest.raises(MediaError, match="damaged"):
        asked(preprocessor, data[:start] + bytes(end - start) + data[end:])


@pytest.mark.parametrize(("name", "container"), [("H.264", "h264"), ("HEVC", "hevc")])
def test_a_bare_stream_is_read(name: str, container: str) -> None:
    data = record(name, container)
    video = check(data, plain(data), survey=False)
    assert len(video.times) == COUNT and not video.cut_short
    piece = data[len(data) // 3 :]
    video = EncodedVideo(piece, None, LIMITS, survey=True)
    assert len(list(video.frames(range(len(video.times))))) == len(video.times) > 20
