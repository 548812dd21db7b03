"""A real server on a free port of the loopback interface, in a thread of the test's process."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from waiting import WAIT_SECONDS as WAIT_SECONDS
from waiting import wait_for as wait_for

from vlm_serve.batch.api.routes import BatchRoutes
from vlm_serve.batch.file_store import FileStore
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.serving import DrainingServer, listen, url_of
from vlm_serve.server.main import make_server
from vlm_serve.server.service import Service


class RunningServer:
    """What a test sees of a server: its URL, a client, and its insides."""

    def __init__(self, server: DrainingServer[Service], engine: Any, url: str) -> None:
        self.server = server
        self.engine = engine
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=WAIT_SECONDS, trust_env=False)

    @property
    def service(self) -> Service:
        return self.server.service

    @property
    def files(self) -> FileStore:
        """The files of a server that keeps some."""
        (routes,) = self.service.mounted
        assert isinstance(routes, BatchRoutes)
        return routes.store

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(text, **fields))

    def stream(self, path: str, body: Any) -> list[dict[str, Any]]:
        """All chunks of a stream, which must be well formed and end with [DONE]."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = "".join(response.iter_text())
        return parse_events(text)

    def stream_chat(self, text: str = "hi", **fields: Any) -> list[dict[str, Any]]:
        return self.stream("/v1/chat/completions", chat_body(text, **fields))


def chat_body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def check_chat(client: httpx.Client) -> None:
    """Have a chat answered, whole and as a stream."""
    answer = client.post("/v1/chat/completions", json=chat_body())
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
    body = chat_body(stream=True)
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert len(parse_events("".join(response.iter_text()))) > 2


def ok(response: httpx.Response) -> dict[str, Any]:
    """The body of an answer that must have come."""
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def parse_events(text: str) -> list[dict[str, Any]]:
    events = text.replace(": waiting\n\n", "").split("\n\n")  # on a machine that is busy
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def running(
    engine: Any, config: ServerConfig | None = None, names: tuple[str, ...] = ("test-model",)
) -> Iterator[RunningServer]:
    """Serves an engine, which is closed at the end."""
    config = config or ServerConfig(port=0)
    bound = listen(config)
    server = make_server(engine, config, names, mounts=(BatchRoutes,))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    running_server = RunningServer(server, engine, url_of(bound))
    try:
        yield running_server
    finally:
        running_server.client.close()
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "the server did not stop"
        bound.close()


def connect(
    server: RunningServer,
    body: bytes,
    length: int | None = None,
    path: str = "/v1/chat/completions",
) -> socket.socket:
    """A raw connection that has sent a request, of a chat unless another path is named."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection
