"""What ends when a client leaves, and the three steps of preparation that make it possible."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversation import build

from vlm_serve.errors import OverloadedError, VlmServeError
from vlm_serve.preprocess.media.fetch import fetch
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.loading import LoadedMedia
from vlm_serve.preprocess.reading.conversation import Conversation, MediaPart
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.system.stopping import Stop, StoppedError

LIMITS = MediaLimits(allow_private_networks=True)


def test_a_stop_wakes_who_waits() -> None:
    stop, called = Stop(), []
    with stop.calling(lambda: called.append("left")):
        pass
    with (
        stop.calling(lambda: called.append("first")),
        stop.calling(lambda: called.append("second")),
    ):
        stop.check()
        stop.set()
    assert called == ["first", "second"]
    with stop.calling(lambda: called.append("late")):
        pass
    assert called[-1] == "late"
    with pytest.raises(StoppedError):
        stop.check()


def test_it_counts_what_its_stages_take() -> None:
    stop = Stop()
    for _ in range(2):
        with stop.timed("wait"):
            time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), stop.timed("work"):
        1 / 0  # noqa: B018
    assert list(stop.seconds) == ["wait", "work"]
    assert stop.seconds["wait"] >= 0.04


def start(work: Callable[[], Any]) -> Future[Any]:
    """Runs it on a thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except VlmServeError as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nab"])
def test_a_fetch_closes_its_socket_when_the_client_leaves(sent: bytes) -> None:
    stop = Stop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        fetching = start(lambda: fetch(url, max_bytes=10_000, limits=LIMITS, stop=stop))
        peer, _ = server.accept()
        with peer:
            peer.settimeout(10)
            assert peer.recv(1000)
            peer.sendall(sent)
            assert not fetching.done()
            stop.set()
            assert peer.recv(1000) == b""
            assert isinstance(fetching.exception(timeout=10), VlmServeError)


def test_a_look_up_is_left_when_the_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, stop = threading.Event(), Stop()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: ended.wait(30) and [])
    fetching = start(lambda: fetch("http://slow.example/", max_bytes=9, limits=LIMITS, stop=stop))
    stop.set()
    assert isinstance(fetching.exception(timeout=10), StoppedError)
    ended.set()


def read(messages: Any) -> Conversation:
    return read_conversation("chat", {"messages": messages})


def ask(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def test_slow_fetches_hold_up_nobody(checkpoint: Path, photographs: Path) -> None:
    """A hundred of them: more than there are threads for fetching."""
    preprocessor, stop = build(checkpoint, limits=LIMITS), Stop()
    picture = {"type": "image", "image": photographs / "chelsea.png"}
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        remote = {"type": "image_url", "image_url": {"url": url}}
        loading = preprocessor.start_loading(preprocessor.begin(read(ask(*[remote] * 100))), stop)
        assert preprocessor.prepare(ask(picture)).media
        assert not any(each.done() for each in loading)
        stop.set()
        begin = time.monotonic()
        assert all(isinstance(each.exception(timeout=20), VlmServeError) for each in loading)
        assert time.monotonic() - begin < 20
    preprocessor.close()


def test_many_pictures_of_one_request_hold_up_nobody(
    checkpoint: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred that take for ever: more than there are threads for decoding."""
    preprocessor, stop = build(checkpoint, limits=LIMITS), Stop()
    slow = {"type": "image", "image": photographs / "rocket.jpg"}
    other = {"type": "image", "image": photographs / "chelsea.png"}
    load, waited = preprocessor._loader.load, threading.Event()

    def slowly(part: MediaPart, cache_salt: str, stop: Stop, root: bytes) -> LoadedMedia:
        if part.source == slow["image"]:
            waited.wait(30)
        return load(part, cache_salt, stop, root)

    monkeypatch.setattr(preprocessor._loader, "load", slowly)
    loading = preprocessor.start_loading(preprocessor.begin(read(ask(*[slow] * 100))), stop)
    assert preprocessor.prepare(ask(other)).media
    assert not any(each.done() for each in loading)
    waited.set()
    assert {each.result(timeout=30).grid for each in loading} == {loading[0].result().grid}
    preprocessor.close()


def test_what_all_fetches_hold_is_bounded(checkpoint: Path, photographs: Path) -> None:
    """A second picture beside a slow one is one too many; afterwards there is room again."""
    body = (photographs / "chelsea.png").read_bytes()
    limits = replace(LIMITS, max_fetched_bytes=len(body) + 100)
    preprocessor, stop = build(checkpoint, limits=limits), Stop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        rendering = preprocessor.begin(read(ask({"type": "image_url", "image_url": {"url": url}})))
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()

        def fetch_one(sent: bytes) -> tuple[socket.socket, Future[Any]]:
            (loading,) = preprocessor.start_loading(rendering, stop)
            peer, _ = server.accept()
            peer.sendall(head + sent)
            return peer, loading

        slow, first = fetch_one(body[:1000])
        wait_until(lambda: preprocessor._loader._budget._held == len(body))
        peer, second = fetch_one(body)
        with peer, pytest.raises(OverloadedError, match="being fetched at once are limited to"):
            second.result(timeout=20)
        with slow:
            slow.sendall(body[1000:])
            assert first.result(timeout=20).grid
        peer, third = fetch_one(body)
        with peer:
            assert third.result(timeout=20).grid
    preprocessor.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_three_steps_are_what_prepare_does(checkpoint: Path, photographs: Path) -> None:
    preprocessor = build(checkpoint)
    messages = ask(
        {"type": "image", "image": photographs / "chelsea.png"},
        {"type": "image", "image": photographs / "rocket.jpg"},
    )
    rendering = preprocessor.begin(read(messages), cache_salt="a")
    media = [each.result() for each in preprocessor.start_loading(rendering, Stop())]
    prompt, expected = (
        preprocessor.finish(rendering, media),
        preprocessor.prepare(messages, cache_salt="a"),
    )
    assert prompt.token_ids == expected.token_ids
    assert prompt.keys.block_keys == expected.keys.block_keys
    assert prompt.spans == expected.spans
    preprocessor.close()
