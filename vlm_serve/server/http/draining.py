"""Serving and orderly shutdown, for every kind of server process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import uvicorn
from starlette.types import ASGIApp

from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.connections import Connections
from vlm_serve.server.http.listening import tls_context
from vlm_serve.server.http.open_requests import OpenRequests

SWITCH_SECONDS = 0.0005
"""The interpreter's switch interval. With the default of 5 ms, /health takes several times as long
while prompts are being prepared."""

_log = logging.getLogger(__name__)

GRACE_SECONDS = 5
"""Time for connections to notice that their request was ended."""

BACKLOG = 128
"""Connections that may wait to be accepted; asyncio accepts as many at once."""


class Servable(Protocol):
    """A service for a `DrainingServer` to run and stop."""

    @property
    def config(self) -> ServerConfig:
        """The server's options."""
        ...

    @property
    def requests(self) -> OpenRequests:
        """The counter of open requests."""
        ...

    def end_streams(self) -> None:
        """End the endless streams."""
        ...

    async def close(self) -> None:
        """Release everything."""
        ...


S = TypeVar("S", bound=Servable)


class DrainingServer(uvicorn.Server, Generic[S]):
    """A uvicorn server with a shutdown in two steps.

    After the first signal (SIGTERM, SIGINT, SIGQUIT, SIGHUP) it refuses new work and lets open
    requests end, up to the timeout. The port stays open meanwhile, and /ready reports it. A second
    signal calls `on_second_signal` from the signal handler. A second SIGHUP does not: a terminal
    that is closed may send several.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: S,
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
        self._loop = loop = asyncio.get_running_loop()
        if self.config.is_ssl:
            # asyncio's own TLS servers let any number of clients be silent, each for a minute.
            create = partial(self._create_tls_server, loop.create_server)
            loop.create_server = create  # type: ignore[method-assign]
        self._watching = asyncio.ensure_future(self.connections.watch())
        await super().startup(sockets)
        self._on_listening()

    async def _create_tls_server(
        self,
        create_server: Callable[..., Awaitable[asyncio.Server]],
        make: Callable[[], asyncio.Protocol],
        *,
        ssl: ssl.SSLContext,
        **options: Any,
    ) -> asyncio.Server:
        """Create the loop's server for connections that count from their acceptance on."""
        return await create_server(partial(self.connections.handshake, make, ssl), **options)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.end_streams()
        paths = [each.getsockname() for each in sockets or () if each.family == socket.AF_UNIX]
        await super().shutdown(sockets)
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if self._watching is not None:
            self._watching.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            # They stay, for what is saved after the server must not be cut off either.
            for each in (signal.SIGHUP, signal.SIGQUIT):
                in_main = threading.current_thread() is threading.main_thread()
                if in_main and signal.getsignal(each) is not signal.SIG_IGN:  # As by nohup.
                    signal.signal(each, self.handle_exit)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGHUP and self.service.requests.draining:
            return
        if self.service.requests.draining or self._loop is None:
            self.should_exit = True
            self.force_exit = True
            self._on_second_signal()
            return
        self.stop()

    def stop(self) -> bool:
        """Stop as after a first signal. Thread-safe. Return False if it is stopping already."""
        if self.service.requests.draining:
            return False
        self.service.requests.draining = True
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._start_draining)
        return True

    def _start_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        requests, timeout = self.service.requests, self.service.config.shutdown_timeout
        _log.info("stopping: %d requests are open", requests.num_open)
        if not await requests.drain(timeout):
            _log.warning("%d requests did not end within %g s", requests.num_open, timeout)
            await self.service.close()
        self.should_exit = True


def ignore_user_signals() -> None:
    """Ignore SIGUSR1 and SIGUSR2, which would end the process, unless they have a meaning."""
    for each in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(each) is signal.SIG_DFL:
            # A handler, unlike SIG_IGN, is not inherited by children.
            signal.signal(each, lambda number, frame: None)


def format_table(rows: Iterable[tuple[str, str]]) -> str:
    """Return rows as text in two aligned columns."""
    pairs = list(rows)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in pairs)


def print_notice(text: str) -> None:
    """Print a notice for the operator; a closed output is no reason to stop."""
    try:
        print(text, flush=True)
    except OSError as error:
        _log.warning("the notice could not be printed: %s", error)


def uvicorn_config(app: ASGIApp, connections: Connections) -> uvicorn.Config:
    """Return the settings for serving an application over these connections.

    Raises:
        ConfigError: the files for TLS cannot be used.
    """
    tls = tls_context(connections.config)
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
        ssl_certfile=connections.config.ssl_certfile,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
