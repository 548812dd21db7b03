"""Decoding slots: never more than there are, and no small file waits for a large one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from vlm_serve.errors import EngineClosedError
from vlm_serve.preprocess.media.decoders import DecodeSlots
from vlm_serve.system.stopping import Stop, StoppedError

MIB = 1 << 20
PATIENCE = 20.0


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Decoder(threading.Thread):
    """Takes a slot, notes its name, and keeps the slot until it is let go."""

    def __init__(self, slots: DecodeSlots, name: str, order: list[str], num_bytes: int = 0) -> None:
        super().__init__(daemon=True, name=name)
        self.stop_sign, self.go = Stop(), threading.Event()
        self._slots, self._order, self._num_bytes = slots, order, num_bytes
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with self._slots.acquire(self._num_bytes, self.stop_sign):
                self._order.append(self.name)
                assert self.go.wait(PATIENCE)
        except Exception as error:
            self.error = error

    def begin(self) -> Decoder:
        """Start, and return once it waits or has a slot."""
        before = self._slots.waiting + self._slots.busy
        self.start()
        until(lambda: self._slots.waiting + self._slots.busy > before)
        return self

    def end(self) -> None:
        self.go.set()
        self.join(PATIENCE)
        assert not self.is_alive()


def test_who_comes_first_is_served_first() -> None:
    slots, order = DecodeSlots(1), list[str]()
    decoders = [Decoder(slots, name, order).begin() for name in "abcd"]
    until(lambda: order == ["a"])
    assert (slots.busy, slots.waiting) == (1, 3)
    for decoder in decoders:
        decoder.end()
    assert order == list("abcd")
    assert (slots.busy, slots.waiting) == (0, 0)


def test_a_large_file_lets_small_ones_pass_but_not_for_ever() -> None:
    """It waits as if it had come a second later for each MiB."""
    slots, order = DecodeSlots(1), list[str]()
    first = Decoder(slots, "first", order).begin()
    large = Decoder(slots, "large", order, 3600 * MIB).begin()
    huge = Decoder(slots, "huge", order, 7200 * MIB).begin()
    small = Decoder(slots, "small", order, 1000).begin()
    for decoder in (first, small, large, huge):
        decoder.end()
    assert order == ["first", "small", "large", "huge"]


def test_as_many_at_a_time_as_there_are_slots() -> None:
    slots, order = DecodeSlots(3), list[str]()
    decoders = [Decoder(slots, str(number), order).begin() for number in range(5)]
    until(lambda: len(order) == 3)
    assert (slots.busy, slots.waiting) == (3, 2)
    decoders[0].end()
    until(lambda: len(order) == 4)
    assert slots.busy == 3
    for decoder in decoders[1:]:
        decoder.end()
    assert slots.busy == 0


def test_who_is_stopped_while_waiting_goes_and_the_next_one_moves_up() -> None:
    slots, order = DecodeSlots(1), list[str]()
    first, gone, last = (Decoder(slots, name, order).begin() for name in ("first", "gone", "last"))
    gone.stop_sign.set()
    gone.join(PATIENCE)
    assert isinstance(gone.error, StoppedError)
    assert slots.waiting == 1
    first.end()
    last.end()
    assert order == ["first", "last"]
    assert gone.stop_sign.seconds["place"] > 0


def test_who_was_stopped_before_takes_no_slot() -> None:
    slots, stop = DecodeSlots(1), Stop()
    stop.set()
    with pytest.raises(StoppedError), slots.acquire(0, stop):
        pass
    assert (slots.busy, slots.waiting) == (0, 0)


def test_a_slot_is_given_back_after_an_error() -> None:
    slots = DecodeSlots(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="torn"), slots.acquire(0, Stop()):
            raise ValueError("torn")
    assert slots.busy == 0


def test_closing_sends_away_who_waits_and_waits_for_who_decodes() -> None:
    slots, order = DecodeSlots(1), list[str]()
    busy, waiting = (Decoder(slots, name, order).begin() for name in ("busy", "waiting"))
    closer = threading.Thread(target=slots.close, daemon=True)
    closer.start()
    waiting.join(PATIENCE)
    assert isinstance(waiting.error, EngineClosedError)
    assert closer.is_alive(), "somebody still decodes"
    busy.end()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    with pytest.raises(EngineClosedError), slots.acquire(0, Stop()):
        pass
