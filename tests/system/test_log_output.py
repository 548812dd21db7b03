"""A log that nobody reads stops nothing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

import pytest
from waiting import wait_for

from vlm_serve.system import log_output
from vlm_serve.system.log_output import BackgroundHandler


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for each in ends:
        os.close(each)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("a", logging.INFO, "", 0, text, None, None)


def read(descriptor: int, ending: bytes) -> bytes:
    data = b""
    while not data.endswith(ending):
        data += os.read(descriptor, 1 << 16)
    return data


def test_lines_are_written_in_order(pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1])
    for number in range(100):
        handler.emit(record(f"line {number} \ud800"))
    handler.flush()
    lines = os.read(pipe[0], 1 << 16).decode().splitlines()
    assert lines == [f"line {number} ?" for number in range(100)]


def test_nobody_reads(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits, memory is bounded, and what was lost is counted once somebody reads."""
    monkeypatch.setattr(log_output, "FLUSH_SECONDS", 0.2)
    handler = BackgroundHandler(pipe[1])
    begin = time.monotonic()
    for _ in range(3000):
        handler.emit(record("x" * 999))
    handler.flush()
    assert time.monotonic() - begin < 5
    assert handler._num_bytes <= log_output.MAX_QUEUED_BYTES
    text = read(pipe[0], b"and lost\n").decode()
    kept = text.count("x\n")
    assert 1000 < kept < 3000
    assert f"\n{3000 - kept} lines of the log were not read in time" in text
    handler.emit(record("again"))
    assert read(pipe[0], b"again\n") == b"again\n"


def test_what_cannot_be_written_is_lost() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        handler = BackgroundHandler(full.fileno())
        handler.emit(record("a line"))
        handler.flush()
        wait_for(lambda: not handler._lines)


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    handler = BackgroundHandler(pipe[1])
    for _ in range(300):
        handler.emit(record("x" * 999))
    handler.emit(record("end"))
    assert len(read(pipe[0], b"end\n")) == 300_004
