"""Messages between a process and its child, over real sockets."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from vlm_serve.system import wire
from vlm_serve.system.wire import SHARED_BYTES, ConnectionLostError, Wire


@contextmanager
def wires() -> Iterator[tuple[Wire, Wire]]:
    left, right = (Wire(each.detach()) for each in socket.socketpair())
    try:
        yield left, right
    finally:
        left.close()
        right.close()


def test_messages_come_in_order_and_whole() -> None:
    with wires() as (left, right):
        left.send("step", {"slices": [1, 2]}, None)
        left.send("free", b"\0" * 100)
        assert right.receive() == ("step", {"slices": [1, 2]}, None)
        assert right.receive(1.0) == ("free", b"\0" * 100)
        right.send()
        assert left.receive(1.0) == ()


def test_tensors_travel_by_value() -> None:
    with wires() as (left, right):
        sent = torch.arange(6.0).view(2, 3)
        left.send("rows", sent)
        sent.zero_()
        _, got = right.receive(1.0)
        assert torch.equal(got, torch.arange(6.0).view(2, 3))
        got.fill_(7.0)
        assert not sent.any()


def test_a_message_larger_than_the_socket_holds() -> None:
    with wires() as (left, right):
        sent = torch.arange(1 << 20)
        sender = threading.Thread(target=left.send, args=("rows", sent))
        sender.start()
        name, got = right.receive(20.0)
        sender.join(20.0)
        assert name == "rows" and torch.equal(got, sent)


def test_who_does_not_answer_in_time_is_gone() -> None:
    with wires() as (left, _right), pytest.raises(ConnectionLostError):
        left.receive(0.01)


def test_who_has_closed_is_gone_for_sender_and_receiver() -> None:
    with wires() as (left, right):
        right.send("last")
        right.close()
        assert left.receive(1.0) == ("last",), "what was said before still arrives"
        with pytest.raises(ConnectionLostError):
            left.receive()
        with pytest.raises(ConnectionLostError):
            for _ in range(2):
                left.send("step")


def test_a_wire_that_was_closed_here_says_so_too() -> None:
    with wires() as (left, _right):
        left.close()
        with pytest.raises(ConnectionLostError):
            left.send("step")
        with pytest.raises(ConnectionLostError):
            left.receive()


def test_large_arrays_are_shared_and_belong_to_who_gets_them() -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with wires() as (left, right):
        sent = [np.full(SHARED_BYTES, number, np.uint8) for number in range(250)]
        sender = threading.Thread(target=left.send, args=("rows", sent, sent[0][:9]))
        sender.start()
        _, got, few = right.receive(20.0)
        sender.join(20.0)
        assert len(os.listdir("/proc/self/fd")) == opened + 3, "one for all arrays"
    assert all((one == number).all() for number, one in enumerate(got))
    got[0][:] = 77
    assert not sent[0].any() and not few.any(), "what was sent is not what came"


def test_without_files_in_memory_arrays_are_part_of_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "_can_share", lambda: False)
    with wires() as (left, right):
        sent = np.arange(SHARED_BYTES, dtype=np.uint8)
        left.send("rows", sent)
        assert (right.receive(1.0)[1] == sent).all()


def test_what_is_lost_on_the_way_leaves_nothing_behind() -> None:
    opened = len(os.listdir("/proc/self/fd"))
    with wires() as (left, right):
        right.close()
        with pytest.raises(ConnectionLostError):
            left.send("rows", np.zeros(2 * SHARED_BYTES, np.uint8))
    assert len(os.listdir("/proc/self/fd")) == opened
