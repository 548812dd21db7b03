"""A sparse sampling decodes from key frame to key frame, with the pixels of a whole decode."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from mutated_media import mutated

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.images import may_be_animated
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.videos import EncodedVideo

LIMITS = MediaLimits()
COUNT, GROUP, RATE = 100, 20, 25
OPEN = "open-gop=1:keyint=20:min-keyint=20:scenecut=0:bframes=3"
REFRESH = "intra-refresh=1:keyint=20:bframes=0"
HEVC = "keyint=20:min-keyint=20:scenecut=0:bframes=3:log-level=none"
VP9 = {"cpu-used": "8", "deadline": "realtime"}
Pixels = npt.NDArray[np.uint8]


def pictures() -> list[Pixels]:
    """Moving noise, with a square that moves otherwise: nothing can be guessed from neighbours."""
    noise = np.random.default_rng(0).integers(0, 64, (48, 64, 3), dtype=np.uint8)
    made = []
    for index in range(COUNT):
        picture = np.roll(noise, index * 2, axis=1)
        picture[(index * 3) % 40 :, (index * 5) % 56 :][:8, :8] = (index * 7) % 256
        made.append(picture)
    return made


def record(container: str, codec: str, options: dict[str, str], *, keyed: bool = True) -> bytes:
    """A file with a key frame every 20 frames; not `keyed`: as the encoder likes."""
    if codec not in av.codecs_available:
        pytest.skip(f"this build of PyAV cannot encode {codec}")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=RATE, options=options)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        if keyed:
            stream.codec_context.gop_size = GROUP
        for picture in pictures():
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def all_frames(data: bytes) -> list[Pixels]:
    """Decode everything in one go, without the code under test."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def assert_same(video: EncodedVideo, indices: list[int], expected: list[Pixels]) -> None:
    found = list(video.frames(indices))
    wrong = [
        index
        for index, pixels in zip(indices, found, strict=True)
        if not np.array_equal(pixels, expected[index])
    ]
    assert not wrong


SPARSE = ([0, 99], [45], [3, 63], [19, 20, 21], [0, 40, 80], list(range(0, 100, 33)))


@pytest.mark.parametrize(
    ("container", "codec", "options", "keyed"),
    [
        ("mp4", "libx264", {"bf": "3", "b-pyramid": "normal", "sc_threshold": "0"}, True),
        ("mpegts", "libx264", {"bf": "3", "sc_threshold": "0"}, True),
        ("matroska", "libx264", {"x264-params": OPEN}, False),
        ("mpegts", "libx264", {"x264-params": OPEN}, False),
        ("mp4", "libx265", {"x265-params": HEVC + ":open-gop=1"}, False),
        ("mpegts", "libx265", {"x265-params": HEVC + ":open-gop=1"}, False),
        ("mpegts", "mpeg2video", {"bf": "2", "sc_threshold": "1000000000"}, True),
        ("mpeg", "mpeg1video", {"bf": "2", "sc_threshold": "1000000000"}, True),
        ("avi", "mpeg4", {"bf": "2", "sc_threshold": "1000000000"}, True),
        ("webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "16"}, True),
        ("webm", "libvpx-vp9", VP9, True),
        ("asf", "wmv2", {"sc_threshold": "1000000000"}, True),
        ("flv", "flv", {"sc_threshold": "1000000000"}, True),
        ("matroska", "ffv1", {"level": "3"}, True),
    ],
)
def test_sparse_frames_are_those_of_a_whole_decode(
    container: str, codec: str, options: dict[str, str], keyed: bool
) -> None:
    data = record(container, codec, options, keyed=keyed)
    expected, video = all_frames(data), EncodedVideo(data, None, LIMITS)
    assert len(video.times) == len(expected) == COUNT
    for indices in SPARSE:
        assert_same(video, indices, expected)
    assert video.sound, "no jump was taken back"
    before = video.num_decoded
    assert_same(video, [45], expected)
    # A jump to the key frame at or before it; decoders may give further frames while they drain.
    assert video.num_decoded - before <= 2 * GROUP


@pytest.mark.parametrize("container", ["mp4", "mpegts", "matroska"])
def test_streams_without_key_frames_are_decoded_from_their_start(container: str) -> None:
    """Encoders for live pictures refresh them bit by bit; files call such places key frames."""
    data = record(container, "libx264", {"x264-params": REFRESH}, keyed=False)
    expected, video = all_frames(data), EncodedVideo(data, None, LIMITS)
    assert sum(video._keys) > 1
    for indices in SPARSE:
        assert_same(video, indices, expected)
    assert not video.sound


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [("asf", "wmv2", {}), ("flv", "flv", {}), ("mp4", "libx265", {"x265-params": HEVC})],
)
def test_key_frames_that_are_none_are_not_believed(
    container: str, codec: str, options: dict[str, str]
) -> None:
    """A file that calls every frame a key frame."""
    data = lying(record(container, codec, options), container)
    expected, video = all_frames(data), EncodedVideo(data, None, LIMITS)
    assert all(video._keys)
    for indices in SPARSE:
        assert_same(video, indices, expected)
    assert not video.sound


def lying(data: bytes, container: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format=container) as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.is_keyframe, packet.stream = True, stream
                output.mux(packet)
    return buffer.getvalue()


def test_an_edit_list_hides_the_same_frames() -> None:
    """A recording that was trimmed without encoding it again: it begins before what is shown."""
    data, buffer = record("mp4", "libx264", {"bf": "2", "sc_threshold": "0"}), io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        shift = None
        for packet in source.demux(video=0):
            if packet.size and packet.pts is not None and packet.dts is not None:
                shift = int(5 / RATE / packet.time_base) if shift is None else shift
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                packet.stream = stream
                output.mux(packet)
    trimmed = buffer.getvalue()
    assert b"elst" in trimmed
    whole, video = all_frames(data), EncodedVideo(trimmed, None, LIMITS)
    hidden = COUNT - len(video.times)
    assert hidden == 5
    for indices in ([0, 94], [15, 16], [40], [0, 30, 60, 90]):
        assert_same(video, indices, whole[hidden:])
    assert video.sound


def test_damage_is_noticed() -> None:
    """While a damaged video is sound, a frame has the same pixels, whatever else was decoded."""
    sound = damaged = 0
    for seed in range(160):
        file = mutated(seed)
        if file.modality != "video" or may_be_animated(file.data):
            continue
        try:
            video = EncodedVideo(file.data, None, LIMITS)
            expected = list(video.frames(range(len(video.times))))
        except MediaError:
            continue
        if not video.sound:
            damaged += 1
            continue
        sound += 1
        for index in range(0, len(expected), 3):
            assert_same(video, [index], expected)
    assert sound > 10 and damaged > 10
