"""Decoding in processes: the same pixels, and every way in which a decode is ended."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoded import decode_image
from hostile_files import many_scans
from PIL import Image
from process_tree import runs

from vlm_serve.errors import EngineClosedError, MediaError
from vlm_serve.preprocess.media.decoders import (
    HEAVY_NICENESS,
    LIGHT_FILE_BYTES,
    MOST_AHEAD,
    DecoderEndedError,
    Decoders,
)
from vlm_serve.preprocess.media.fetch import naming
from vlm_serve.preprocess.media.images import count_scans
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.videos import EncodedVideo
from vlm_serve.system.stopping import Stop, StoppedError

LIMITS = MediaLimits()
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    made = Decoders(2, 1)
    yield made
    made.close()


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def small() -> bytes:
    return encode(Image.new("RGB", (40, 30), (200, 30, 90)), "PNG")


@functools.cache
def large() -> bytes:
    """A small file of many pixels."""
    return encode(Image.new("L", (8000, 6000)), "PNG")


def pixels_of(
    decoders: Decoders, data: bytes, limits: MediaLimits = LIMITS, stop: Stop | None = None
) -> Any:
    with naming("where"), decoders.image(data, limits, stop or Stop()) as pixels:
        return pixels.copy()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_worker_does_not_import_torch() -> None:
    script = "import vlm_serve.preprocess.media.decode_worker, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_images_are_as_they_are_decoded_here(decoders: Decoders, photographs: Path) -> None:
    for name in ("rocket.jpg", "coffee.png", "page.png"):
        data = (photographs / name).read_bytes()
        assert np.array_equal(pixels_of(decoders, data), decode_image(data, LIMITS))
    assert len(decoders.pids) == 1


def test_videos_are_as_they_are_decoded_here(decoders: Decoders, videos: Path) -> None:
    data = (videos / "bikes.mp4").read_bytes()
    expected = EncodedVideo(data, None, LIMITS)
    indices = [0, 3, 3, 90, 249]
    for wanted in (indices, indices[:1]):
        with decoders.video(data, None, LIMITS, Stop()) as video:
            assert (video.fps, video.times) == (expected.fps, expected.times)
            found = list(video.frames(wanted))
        assert all(
            np.array_equal(*each) for each in zip(found, expected.frames(wanted), strict=True)
        )
    with decoders.video(data, None, LIMITS, Stop()) as video:
        next(iter(video.frames(indices)))
    with decoders.video(data, None, LIMITS, Stop()):
        pass
    assert decoders.pids == [], "whatever was left unread"


def test_frames_are_decoded_ahead_of_their_consumer(decoders: Decoders, videos: Path) -> None:
    """Those that wait are there, whatever becomes of the decoder."""
    data = (videos / "carphone_pristine.mp4").read_bytes()
    with decoders.video(data, None, LIMITS, Stop()) as video:
        indices = range(0, 80, 4)
        expected = list(EncodedVideo(data, None, LIMITS).frames(indices))
        frames = video.frames(indices)
        found = [next(frames), next(frames)]
        (process,) = decoders._all
        assert video.num_decoded < 80

        def waiting() -> int:
            counted = fcntl.ioctl(process._sock, termios.FIONREAD, bytes(4))
            return int.from_bytes(counted, sys.byteorder)

        message = len('{"shape": [144, 192, 3], "sound": true, "decoded": 10}')
        wait_until(lambda: waiting() > (MOST_AHEAD - 1) * message)
        os.kill(process.pid, signal.SIGSTOP)
        found += [next(frames) for _ in range(MOST_AHEAD - 1)]
        os.kill(process.pid, signal.SIGCONT)
        found += list(frames)
    assert all(map(np.array_equal, found, expected)) and len(found) == len(expected)
    assert video.sound


def test_large_frames_do_not_pile_up(
    decoders: Decoders, videos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (videos / "carphone_pristine.mp4").read_bytes()
    (frame,) = EncodedVideo(data, None, LIMITS).frames([0])
    monkeypatch.setattr("vlm_serve.preprocess.media.decoders._AHEAD_BYTES", 3 * frame.nbytes)
    with decoders.video(data, None, LIMITS, Stop()) as video:
        asked = [video._asked for _ in video.frames(range(9))]
    assert asked == [0, 2, 2, 2, 2, 2, 2, 1, 0]


def test_what_a_worker_refuses_costs_no_process(decoders: Decoders) -> None:
    assert pixels_of(decoders, small()).shape == (30, 40, 3)
    before = decoders.pids
    for data in (b"", b"no image", small()[:60]):
        with pytest.raises(MediaError) as caught:
            pixels_of(decoders, data)
        assert caught.value.param == "where"
    with (
        pytest.raises(MediaError, match="not a video"),
        decoders.video(b"no video", None, LIMITS, Stop()),
    ):
        pass
    with pytest.raises(ZeroDivisionError), decoders.image(small(), LIMITS, Stop()):
        1 / 0  # noqa: B018
    assert decoders.pids == before


def test_scans_are_counted_from_the_markers() -> None:
    plain = encode(Image.new("RGB", (64, 64)), "JPEG")
    assert count_scans(plain, 100) == 1
    assert count_scans(many_scans(57), 100) == 57
    assert count_scans(many_scans(500), 100) == 101
    assert count_scans(small(), 100) == 0
    thumbnail = b"\xff\xe1" + struct.pack(">H", len(plain) + 2) + plain
    assert count_scans(plain[:2] + thumbnail + plain[2:], 100) == 1
    for broken in (b"\xff\xd8", plain[:30], plain[:-300], b"\xff\xd8" + b"\xff" * 99):
        assert count_scans(broken, 100) <= 1


def test_a_jpeg_of_too_many_scans_is_refused(decoders: Decoders) -> None:
    assert pixels_of(decoders, many_scans(LIMITS.max_image_scans)).shape == (64, 64, 3)
    with pytest.raises(MediaError, match="over 100 scans"):
        pixels_of(decoders, many_scans(2000))


def test_memory_is_refused_by_what_the_header_declares(decoders: Decoders) -> None:
    with pytest.raises(MediaError, match="over 100 MiB"):
        pixels_of(decoders, large(), replace(LIMITS, max_decode_bytes=100 << 20))


def test_memory_is_bounded_while_decoding(decoders: Decoders) -> None:
    """A WebP file takes several times what its pixels take."""
    data = encode(Image.new("RGBA", (3000, 3000), (1, 2, 3, 4)), "WEBP", lossless=True)
    limits = replace(LIMITS, max_decode_bytes=80 << 20)
    with pytest.raises(MediaError, match="memory|80 MiB|damaged"):
        pixels_of(decoders, data, limits)
    assert pixels_of(decoders, data).shape == (3000, 3000, 3)


def test_a_decode_ends_at_its_deadline(decoders: Decoders) -> None:
    pixels_of(decoders, small())
    before = decoders.pids
    with pytest.raises(MediaError, match=r"longer than 0\.01 seconds") as caught:
        # Long enough not to be shown to the light one first, which has no more time.
        data = large() + bytes(LIGHT_FILE_BYTES)
        pixels_of(decoders, data, replace(LIMITS, max_image_decode_seconds=0.01))
    assert caught.value.param == "where"
    assert decoders.pids == before
    with pytest.raises(MediaError, match="longer than 1e-05 seconds"):
        pixels_of(decoders, small(), replace(LIMITS, max_image_decode_seconds=1e-5))
    assert decoders.pids == [], "it was still at it"
    assert pixels_of(decoders, small()).shape == (30, 40, 3)


def test_a_video_is_refused_at_its_deadline(decoders: Decoders, videos: Path) -> None:
    data = (videos / "bikes.mp4").read_bytes()
    limits = replace(LIMITS, max_decode_seconds=1e-4)
    with (
        pytest.raises(MediaError, match="longer than 0.0001 seconds"),
        decoders.video(data, None, limits, Stop()),
    ):
        pass


def test_a_decode_ends_with_its_client(decoders: Decoders, videos: Path) -> None:
    stop = Stop()
    data = (videos / "bikes.mp4").read_bytes()
    with (
        pytest.raises(StoppedError),
        decoders.video(data, None, LIMITS, stop) as video,
    ):
        frames = iter(video.frames(range(250)))
        next(frames)
        (process,) = decoders.pids
        stop.set()
        list(frames)
    assert decoders.pids == []
    wait_until(lambda: not runs(process))
    with pytest.raises(StoppedError):
        pixels_of(decoders, small(), stop=stop)


def test_waiting_for_a_process_ends_with_the_client(decoders: Decoders) -> None:
    stop, ended = Stop(), threading.Event()

    def wait() -> None:
        with contextlib.suppress(StoppedError):
            pixels_of(decoders, small(), stop=stop)
        ended.set()

    with contextlib.ExitStack() as busy:
        for _ in range(2):
            busy.enter_context(decoders.image(small(), LIMITS, Stop()))
        thread = threading.Thread(target=wait)
        thread.start()
        assert not ended.wait(0.1)
        stop.set()
        thread.join()
    assert ended.is_set()


def test_heavy_images_hold_up_no_light_one(decoders: Decoders) -> None:
    """One place for heavy ones and three of them: the others wait, a light one does not."""
    order: list[str] = []

    def decode(name: str, data: bytes) -> None:
        pixels_of(decoders, data)
        order.append(name)

    with decoders.image(large(), LIMITS, Stop()):
        waiting = [threading.Thread(target=decode, args=("heavy", large())) for _ in range(2)]
        for thread in waiting:
            thread.start()
        wait_until(lambda: decoders.heavy.waiting == 2)
        decode("light", small())
        assert order == ["light"]
    for thread in waiting:
        thread.join()
    assert order == ["light", "heavy", "heavy"]


def test_what_is_heavy_is_known_before_it_is_decoded(decoders: Decoders) -> None:
    """By the file's length, by its pixels times its scans; light ones share a process that stays,
    at the priority of the server, heavy ones have one each, at a lower one."""
    many_bytes = small() + bytes(LIGHT_FILE_BYTES)
    scans = encode(Image.new("RGB", (800, 800)), "JPEG", progressive=True)
    last = scans[scans.rindex(b"\xff\xda") : -2]
    for data, heavy in (
        (small(), False),
        (many_bytes, True),
        (scans, True),
        (scans[:-2] + last * 9 + scans[-2:], True),
        (encode(Image.new("L", (2048, 2048)), "PNG"), False),
        (encode(Image.new("L", (2049, 2048)), "PNG"), True),
    ):
        with decoders.image(data, LIMITS, Stop()):
            assert (decoders.heavy.busy, decoders.light.busy) == (heavy, not heavy)
            niceness = {os.getpriority(os.PRIO_PROCESS, pid) for pid in decoders.pids}
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert niceness == ({own, min(own + HEAVY_NICENESS, 19)} if heavy else {own})
    assert len(decoders.pids) == 1


def test_a_light_image_that_takes_much_memory_is_heavy(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(Image.new("RGBA", (2000, 2000), (1, 2, 3, 4)), "PNG")
    for most, heavy in ((16 << 20, True), (256 << 20, False)):
        monkeypatch.setattr("vlm_serve.preprocess.media.decoders.LIGHT_DECODE_BYTES", most)
        with decoders.image(data, LIMITS, Stop()) as pixels:
            assert (pixels == decode_image(data, LIMITS)).all()
            assert decoders.heavy.busy == heavy


def test_a_process_that_dies_is_replaced(decoders: Decoders) -> None:
    pixels_of(decoders, small())
    (idle,) = decoders.pids
    os.kill(idle, signal.SIGKILL)
    wait_until(lambda: decoders.pids == [])
    assert pixels_of(decoders, small()).shape == (30, 40, 3)
    (light,) = decoders.pids

    def kill_when_busy() -> None:
        wait_until(lambda: len(decoders.pids) == 2)
        (heavy,) = {*decoders.pids} - {light}
        os.kill(heavy, signal.SIGKILL)

    thread = threading.Thread(target=kill_when_busy)
    thread.start()
    with pytest.raises(DecoderEndedError):
        pixels_of(decoders, large())
    thread.join()
    assert pixels_of(decoders, small()).shape == (30, 40, 3)


def test_what_forks_them_is_replaced_when_it_dies(decoders: Decoders) -> None:
    pixels_of(decoders, small())
    process = decoders._fork_server._process
    assert process is not None
    process.kill()
    process.wait()
    assert pixels_of(decoders, large()).shape == (6000, 8000, 3)
    assert len(decoders.pids) == 1, "the light one knows nothing of it"


def test_what_forks_them_is_replaced_when_it_is_stopped(decoders: Decoders) -> None:
    pixels_of(decoders, small())
    process = decoders._fork_server._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    assert pixels_of(decoders, large()).shape == (6000, 8000, 3)
    assert time.monotonic() - begin < 30
    assert not runs(process.pid)


def test_a_stopped_process_ends_at_the_deadline(decoders: Decoders) -> None:
    pixels_of(decoders, small())
    (idle,) = decoders.pids
    os.kill(idle, signal.SIGSTOP)
    with pytest.raises(MediaError, match="longer than 1 seconds"):
        pixels_of(decoders, small(), replace(LIMITS, max_image_decode_seconds=1))
    wait_until(lambda: not runs(idle))
    assert pixels_of(decoders, small()).shape == (30, 40, 3)


def test_closing_ends_whatruns() -> None:
    decoders = Decoders()
    pixels_of(decoders, small())
    pids = decoders.pids
    decoders.close()
    wait_until(lambda: not any(map(runs, pids)))
    with pytest.raises(EngineClosedError):
        pixels_of(decoders, small())
    decoders.close()


OWNER = """
import sys, time
from vlm_serve.preprocess.media.decoders import Decoders
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.system.stopping import Stop
import threading

decoders = Decoders(1, 1)
data = open(sys.argv[1], "rb").read()

def decode():
    while True:
        with decoders.image(data, MediaLimits(), Stop()):
            pass

threading.Thread(target=decode, daemon=True).start()
while not decoders.pids:
    time.sleep(0.01)
print(decoders.pids[0], flush=True)
time.sleep(600)
"""


def test_processes_end_with_their_owner(tmp_path: Path) -> None:
    """Also when the owner is killed in the middle of a decode; and a script that comes over
    standard input, with no guard for its main part, can have them."""
    (tmp_path / "large.png").write_bytes(large())
    with subprocess.Popen(
        [sys.executable, "-", str(tmp_path / "large.png")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        owner.stdin.write(OWNER)
        owner.stdin.close()
        worker = int(owner.stdout.readline())
        time.sleep(0.2)
        owner.kill()
    wait_until(lambda: not runs(worker))
