"""Decoding processes that end in the middle: the medium's fault, or the machine's."""

from __future__ import annotations

import errno
import io
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversation import build, clip, frames, picture, recorded, say
from decoded import decode_image
from PIL import Image

from vlm_serve.errors import MediaError, OverloadedError
from vlm_serve.preprocess.media import decode_wire, decoders
from vlm_serve.preprocess.media.decoders import DecodeProcess, DecoderEndedError, Decoders, twice
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.system.stopping import Stop

LIMITS = MediaLimits()
Kill = Callable[..., list[int]]


@pytest.fixture
def made() -> Iterator[Decoders]:
    decoders = Decoders(2, 1)
    yield decoders
    decoders.close()


@pytest.fixture
def preprocessor(checkpoint: Path) -> Iterator[Preprocessor]:
    preprocessor = build(checkpoint)
    yield preprocessor
    preprocessor.close()


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Kill:
    """Let signals end the processes that get the next tasks, before they are done."""

    def arm(*numbers: int, after: int = 0) -> list[int]:
        left, done = iter(numbers), list[int]()
        asked, ask = itertools.count(), DecodeProcess.ask

        def ask_and_kill(process: DecodeProcess, *arguments: Any) -> None:
            number = next(left, None) if next(asked) >= after else None
            if number is None:
                ask(process, *arguments)
                return
            os.kill(process.pid, signal.SIGSTOP)
            ask(process, *arguments)
            os.kill(process.pid, number)
            os.kill(process.pid, signal.SIGCONT)
            done.append(process.pid)

        monkeypatch.setattr(DecodeProcess, "ask", ask_and_kill)
        return done

    return arm


def png(side: int = 40) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (200, 30, 90)).save(buffer, "PNG")
    return buffer.getvalue()


def pixels_of(made: Decoders, data: bytes) -> Any:
    def decode() -> Any:
        with made.image(data, LIMITS, Stop()) as pixels:
            return pixels.copy()

    return twice(decode)


SOUND = [
    (signal.SIGKILL,),
    (signal.SIGTERM,),
    (signal.SIGSEGV,),
    (signal.SIGABRT,),
]


@pytest.mark.parametrize("numbers", SOUND)
@pytest.mark.parametrize("side", [40, pytest.param(2600, marks=pytest.mark.sweep)])
def test_who_is_ended_once_is_asked_again(
    made: Decoders, kill: Kill, numbers: tuple[int, ...], side: int
) -> None:
    done, data = kill(*numbers), png(side)
    assert np.array_equal(pixels_of(made, data), decode_image(data, LIMITS))
    assert len(done) == 1


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGKILL, signal.SIGKILL),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGKILL, signal.SIGSEGV),
        (signal.SIGSEGV, signal.SIGKILL),
    ],
)
def test_a_medium_is_not_blamed_for_what_others_end(
    made: Decoders, kill: Kill, numbers: tuple[int, ...]
) -> None:
    kill(*numbers)
    with pytest.raises(OverloadedError, match="was ended, twice: try again later") as caught:
        pixels_of(made, png())
    assert caught.value.status == 503
    assert pixels_of(made, png()).shape == (40, 40, 3)


@pytest.mark.parametrize(
    "numbers", [(signal.SIGSEGV, signal.SIGSEGV), (signal.SIGABRT, signal.SIGBUS)]
)
def test_a_medium_is_blamed_for_two_crashes(
    made: Decoders, kill: Kill, numbers: tuple[int, ...]
) -> None:
    kill(*numbers)
    with pytest.raises(MediaError, match="damaged"):
        pixels_of(made, png())


def test_it_is_not_known_how_a_process_ended_whose_fork_server_is_gone(
    made: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels_of(made, png())
    ask = DecodeProcess.ask

    def kill_both(process: DecodeProcess, *arguments: Any) -> None:
        server = made._fork_server._process
        assert server is not None
        for pid in (server.pid, process.pid):
            os.kill(pid, signal.SIGKILL)
        ask(process, *arguments)

    with monkeypatch.context() as patch, pytest.raises(DecoderEndedError):
        patch.setattr(DecodeProcess, "ask", kill_both)
        pixels_of(made, png())
    assert pixels_of(made, png()).shape == (40, 40, 3)


def test_a_video_begins_anew(preprocessor: Preprocessor, kill: Kill) -> None:
    """Whether its decoder is ended at its start or after some frames."""
    source = recorded(frames(25))
    expected = build_prompt(preprocessor, source, fps=1.0)
    for after in (0, 1, 4):
        done = kill(signal.SIGKILL, after=after)
        other = build_prompt(preprocessor, recorded(frames(25, seed=1 + after)), fps=1.0)
        assert len(done) == 1 and len(other.spans) == len(expected.spans)
    kill(*[signal.SIGKILL] * 2, after=1)
    with pytest.raises(OverloadedError):
        build_prompt(preprocessor, recorded(frames(40)), fps=1.0)


def build_prompt(preprocessor: Preprocessor, source: Any, **options: Any) -> Any:
    return preprocessor.prepare([say(clip(source, **options), "?")])


def test_pictures_and_documents_are_tried_again(preprocessor: Preprocessor, kill: Kill) -> None:
    done = kill(signal.SIGKILL)
    assert preprocessor.prepare([say(picture(png()), "?")]).spans
    buffer = io.BytesIO()
    Image.new("RGB", (90, 90)).save(buffer, "PDF")
    done += kill(signal.SIGKILL)
    assert preprocessor._decoders.pages(LIMITS, buffer.getvalue()) == 1
    assert len(done) == 1
    kill(signal.SIGKILL, signal.SIGKILL)
    with pytest.raises(OverloadedError):
        preprocessor._decoders.pages(LIMITS, buffer.getvalue())


@pytest.mark.parametrize("what", ["process", "pair", "memory", "mapping"])
def test_a_machine_without_room_is_no_fault_of_the_medium(
    made: Decoders, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    def unmapped(*arguments: Any, **options: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(OverloadedError) as caught:
        if what == "process":
            patch.setattr(subprocess, "Popen", full)
        elif what == "pair":
            patch.setattr(socket, "socketpair", full)
        elif what == "memory":
            patch.setattr(decode_wire, "_new_memory", full)
        else:
            patch.setattr(decoders, "take_array", unmapped)
        pixels_of(made, png())
    assert caught.value.status == 503 and "try again later" in caught.value.message
    assert pixels_of(made, png()).shape == (40, 40, 3)


def test_ended_processes_leave_nothing_behind(made: Decoders, kill: Kill) -> None:
    """No zombies, and no more statuses than some."""
    pixels_of(made, png())
    server = made._fork_server._process
    assert server is not None
    for _ in range(3):
        kill(signal.SIGKILL)
        pixels_of(made, png())
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert list(map(int, children)) == made.pids
