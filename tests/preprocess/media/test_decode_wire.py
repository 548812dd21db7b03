"""Messages and shared memory between a decoding process and its owner, over real sockets."""

from __future__ import annotations

import gc
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vlm_serve.preprocess.media.decode_wire import (
    MAX_MESSAGE_BYTES,
    GoneError,
    SharedArray,
    map_array,
    receive,
    send,
    share,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def later(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_messages_come_in_order_and_whole(pair: Pair) -> None:
    left, right = pair
    messages: list[dict[str, Any]] = [
        {},
        {"kind": "image", "größe": [1, None]},
        {"text": "x" * 100_000},
    ]

    def send_all() -> None:
        for each in messages:
            send(left, each)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [receive(right, later()) for _ in messages] == [(each, -1) for each in messages]
    sender.join()


def test_memory_travels_with_a_message(pair: Pair) -> None:
    left, right = pair
    with share(b"the bytes of a file") as shared:
        send(left, {"size": 19}, shared.descriptor)
        message, descriptor = receive(right, later())
    assert message == {"size": 19} and descriptor >= 0
    seen = map_array(descriptor, (19,), np.uint8)
    os.close(descriptor)
    assert seen.tobytes() == b"the bytes of a file", "it outlives both descriptors"
    shared.array[:3] = np.frombuffer(b"THE", np.uint8)
    assert seen.tobytes().startswith(b"THE"), "it is one memory"


def test_an_array_of_nothing_can_be_shared() -> None:
    with SharedArray((0, 4, 3), np.float32) as shared:
        assert map_array(shared.descriptor, (0, 4, 3), np.float32).shape == (0, 4, 3)


def test_memory_that_is_smaller_than_what_is_said_is_not_touched() -> None:
    with SharedArray((4096,), np.uint8) as shared:
        with pytest.raises(GoneError):
            map_array(shared.descriptor, (4097,), np.uint8)
        with pytest.raises(GoneError):
            map_array(shared.descriptor, (4096,), np.float32)


def test_memory_cannot_be_cut_off_once_it_is_mapped() -> None:
    with SharedArray((4096,), np.uint8) as shared:
        seen = map_array(shared.descriptor, (4096,), np.uint8)
        with pytest.raises(PermissionError):
            os.ftruncate(shared.descriptor, 0)
        assert not seen.any()


def test_who_says_nothing_in_time(pair: Pair) -> None:
    _, right = pair
    with pytest.raises(TimeoutError):
        receive(right, later(0.01))
    with pytest.raises(TimeoutError):
        receive(right, time.monotonic() - 1)


def test_half_a_message_in_time_is_none(pair: Pair) -> None:
    left, right = pair
    left.sendall(struct.pack("<I", 100) + b'{"kind"')
    with pytest.raises(TimeoutError):
        receive(right, later(0.01))


def test_who_waited_with_a_deadline_waits_without_one_afterwards(pair: Pair) -> None:
    left, right = pair
    send(left, {"first": 1})
    receive(right, later(0.05))
    timer = threading.Timer(0.2, send, (left, {"second": 2}))
    timer.start()
    assert receive(right) == ({"second": 2}, -1)
    timer.join()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x05\x00",
        struct.pack("<I", 10) + b"{}",
        struct.pack("<I", MAX_MESSAGE_BYTES + 1),
        struct.pack("<I", 2) + b"{x",
        struct.pack("<I", 2) + b"\xff\xfe",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 100_000) + b"[" * 100_000,
    ],
    ids=["nothing", "half a length", "half a body", "too long", "no JSON", "no text", "a list"]
    + ["too deep"],
)
def test_what_is_no_message_counts_as_gone(pair: Pair, sent: bytes) -> None:
    left, right = pair
    left.sendall(sent)
    left.shutdown(socket.SHUT_WR)
    with pytest.raises(GoneError):
        receive(right, later())


def test_no_descriptor_is_left_behind_by_a_broken_message(pair: Pair) -> None:
    left, right = pair
    before = open_descriptors()
    with share(b"abc") as shared:
        body = json.dumps([1]).encode()
        socket.send_fds(left, [struct.pack("<I", len(body))], [shared.descriptor])
        left.sendall(body)
        with pytest.raises(GoneError):
            receive(right, later())
    del shared
    assert open_descriptors() == before


def test_sending_to_who_has_closed(pair: Pair) -> None:
    left, right = pair
    right.close()
    with pytest.raises(GoneError):
        send(left, {"late": True})
