"""Listening, and an orderly end: what every server process does, whatever it answers with."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Generic, TypeVar

import uvicorn
from starlette.types import ASGIApp

from vlm_serve.errors import ConfigError
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.connections import Connections
from vlm_serve.server.work import Work

SWITCH_SECONDS = 0.0005
"""Longest that a thread which computes in Python keeps the event loop waiting for its turn. With
Python's own 5 ms, /health waits several times as long while prompts are being prepared."""

_log = logging.getLogger(__name__)

GRACE_SECONDS = 5
"""How long connections may take to notice that their request has been ended."""

BACKLOG = 128
"""Connections that may wait to be accepted; asyncio accepts as many in one go."""


W = TypeVar("W", bound=Work)


class DrainingServer(uvicorn.Server, Generic[W]):
    """Stops in two steps. The first signal refuses new work (/ready says so at once, the port stays
    open to tell) and lets running requests end; the timeout ends everything. A second signal calls
    `on_second_signal`, in the signal's handler."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: W,
        connections: Connections,
        on_listening: Callable[[], None] = lambda: None,
        on_second_signal: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self.service = service
        self.connections = connections
        self._on_listening = on_listening
        self._on_second_signal = on_second_signal
        self._watching: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._watching = asyncio.ensure_future(self.connections.watch())
        await super().startup(sockets)
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.end_streams()
        await super().shutdown(sockets)
        if self._watching is not None:
            self._watching.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining or self._loop is None:
            self.should_exit = True
            self.force_exit = True
            self._on_second_signal()
            return
        self.service.draining = True
        self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        timeout = self.service.config.shutdown_timeout
        _log.info("stopping: %d requests are open", self.service.num_open)
        if not await self.service.drain(timeout):
            _log.warning("%d requests did not end within %g s", self.service.num_open, timeout)
            await self.service.close()
        self.should_exit = True


def listen(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address. Raises ConfigError if it cannot be."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio has connections send at once only if their protocol is named.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((config.host, config.port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}", param="port"
        ) from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def say(text: str) -> None:
    """Prints what an operator wants to read; a server goes on if nobody can."""
    try:
        print(text, flush=True)
    except OSError as error:
        _log.warning("nothing can be printed: %s", error)


def uvicorn_config(app: ASGIApp, connections: Connections) -> uvicorn.Config:
    """How an application is served over those connections."""
    return uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]
        loop="asyncio",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=connections.config.keep_alive_timeout,
        timeout_graceful_shutdown=GRACE_SECONDS,
        lifespan="on",
        ws="none",
    )
