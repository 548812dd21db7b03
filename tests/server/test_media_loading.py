"""Media are waited for beside everybody else, and only while their client waits too."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from serving import RunningServer, connect, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.rendering import Rendering
from vlm_serve.server.config import ServerConfig
from vlm_serve.system.stopping import Stop


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="32MiB",
        max_model_len=2048,
        max_num_seqs=4,
        allow_private_networks=True,
        threads=1,
    )
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0, preprocess_threads=2)) as made:
        yield made
    engine.close()


def asking(url: str) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": url}}
    content = [picture, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


class SilentHost:
    """Accepts connections and says nothing."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._socket.settimeout(30)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/picture.png"

    def accept(self) -> socket.socket:
        peer, _ = self._socket.accept()
        peer.settimeout(30)
        assert peer.recv(4096).startswith(b"GET /picture.png")
        return peer

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def host() -> Iterator[SilentHost]:
    made = SilentHost()
    yield made
    made.close()


def test_media_begin_to_load_off_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may need a new thread, and whoever begins one waits until it runs."""
    preprocessor = server.engine.preprocessor
    start, begun = preprocessor.start_loading, []

    def start_loading(rendering: Rendering, stop: Stop) -> Any:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        begun.append(rendering)
        return start(rendering, stop)

    monkeypatch.setattr(preprocessor, "start_loading", start_loading)
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "green").save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    assert server.client.post("/v1/chat/completions", json=asking(url)).status_code == 200
    assert len(begun) == 1


@pytest.mark.parametrize("leave", [False, True], ids=["waiting", "gone"])
def test_slow_fetches_hold_up_no_text(server: RunningServer, host: SilentHost, leave: bool) -> None:
    """More of them than there are threads of any kind but their own."""
    body = json.dumps(asking(host.url)).encode()
    with contextlib.ExitStack() as open_sockets:
        clients = [open_sockets.enter_context(connect(server, body)) for _ in range(12)]
        peers = [open_sockets.enter_context(host.accept()) for _ in clients]
        if leave:
            for client in clients:
                client.close()
            assert [peer.recv(10) for peer in peers] == [b""] * len(peers)
        answer = server.chat("hello", max_tokens=2)
        assert answer.status_code == 200
        if not leave:
            assert server.service.requests.num_open >= len(clients)
    wait_for(lambda: server.service.requests.num_open == 0)


def test_shortening_a_conversation_ends_with_its_client(
    server: RunningServer, host: SilentHost
) -> None:
    """It loads media itself, as often as it tries."""
    part = {"type": "input_image", "image_url": host.url, "detail": "auto"}
    body = {"input": [{"role": "user", "content": [part]}], "truncation": "auto"}
    with connect(server, json.dumps(body).encode(), path="/v1/responses") as client:
        peer = host.accept()
        client.close()
        with peer:
            assert peer.recv(10) == b""
    wait_for(lambda: server.service.requests.num_open == 0)


def test_a_decode_ends_with_its_client(server: RunningServer) -> None:
    """The process that decodes is gone as soon as its client is."""
    buffer = io.BytesIO()
    Image.new("L", (8000, 8000)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    decoders = server.engine.preprocessor._decoders
    small = io.BytesIO()
    Image.new("RGB", (64, 64)).save(small, "PNG")
    small_url = "data:image/png;base64," + base64.b64encode(small.getvalue()).decode()
    assert server.post("/v1/chat/completions", asking(small_url)).status_code == 200
    before = set(decoders.pids)
    assert before
    with connect(server, json.dumps(asking(url)).encode()):
        wait_for(lambda: decoders.heavy.busy > 0 and set(decoders.pids) > before)
    wait_for(lambda: server.service.requests.num_open == 0 and not decoders.heavy.busy)
    assert set(decoders.pids) == before
    assert server.post("/v1/chat/completions", asking(small_url)).status_code == 200


def test_pictures_that_are_waited_for_are_answered(server: RunningServer, host: SilentHost) -> None:
    answers: list[Any] = []
    body = asking(host.url)
    thread = threading.Thread(
        target=lambda: answers.append(server.post("/v1/chat/completions", body))
    )
    thread.start()
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (9, 99, 0)).save(buffer, "PNG")
    picture = buffer.getvalue()
    with host.accept() as peer:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(picture)}\r\n\r\n"
        peer.sendall(head.encode() + picture)
        thread.join()
    assert answers[0].status_code == 200, answers[0].text


def test_what_is_fetched_is_in_the_budget_of_requests(
    server: RunningServer, host: SilentHost
) -> None:
    """From the first byte on, and until the request has ended."""
    buffer = io.BytesIO()
    Image.effect_noise((1000, 1000), 99).convert("RGB").save(buffer, "PNG")
    picture, memory = buffer.getvalue(), server.service.admission.memory
    assert len(picture) > 500_000
    with connect(server, json.dumps(asking(host.url)).encode()) as client:
        with host.accept() as peer:
            assert memory.held < 100_000
            peer.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(picture)}\r\n\r\n".encode())
            peer.sendall(picture[:1000])
            wait_for(lambda: memory.held > len(picture))
        client.settimeout(30)
        assert b" 422 " in client.recv(100)
    wait_for(lambda: memory.held == 0)
