"""Serving and orderly shutdown, for every kind of server process.

A server listens on a TCP or Unix socket, plain or with TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import uvicorn
from starlette.types import ASGIApp

from vlm_serve.errors import ConfigError
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.admission import OpenRequests
from vlm_serve.server.http.auth import guarded
from vlm_serve.server.http.browsers import for_browsers
from vlm_serve.server.http.connections import Connection, Connections, Handshake
from vlm_serve.server.http.root_path import BelowRoot
from vlm_serve.server.http.tenants import read_tenant_keys
from vlm_serve.system.log_output import start_logging

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
        return await create_server(partial(Handshake, self.connections, make, ssl), **options)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.end_streams()
        paths = [
            listener.getsockname()
            for listener in sockets or ()
            if listener.family == socket.AF_UNIX
        ]
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
            for number in (signal.SIGHUP, signal.SIGQUIT):
                in_main = threading.current_thread() is threading.main_thread()
                if in_main and signal.getsignal(number) is not signal.SIG_IGN:  # As by nohup.
                    signal.signal(number, self.handle_exit)
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
        requests = self.service.requests
        _log.info("stopping: %d requests are open", requests.num_open)
        if not await requests.drain(self.service.config.shutdown_timeout):
            _log.warning("%d requests are open still, and are ended", requests.num_open)
            await self.service.close()
        self.should_exit = True


def public(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Return an application behind the layers of every public server: root path, hosts and origins,
    page, keys.

    Raises:
        ConfigError: the file of tenants' keys is bad.
    """
    app = guarded(app, config, read_tenant_keys(config.tenant_keys))
    app = for_browsers(app, config)
    return BelowRoot(app, config.root_path) if config.root_path else app


def begin_process(config: ServerConfig) -> None:
    """Set up the process of a server: its threads, its log and its signals."""
    sys.setswitchinterval(SWITCH_SECONDS)
    start_logging(config.log_level)
    # asyncio would warn of every chunk for a client that has disconnected.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    # SIGUSR1 and SIGUSR2 would end the process, unless they have a meaning.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            # A handler, unlike SIG_IGN, is not inherited by children.
            signal.signal(number, lambda number, frame: None)


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
        http=partial(Connection, connections),  # type: ignore[arg-type]
        loop="asyncio",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # anybody on the host could name addresses, and have many shares
        timeout_keep_alive=connections.config.keep_alive_timeout,
        timeout_graceful_shutdown=GRACE_SECONDS,
        lifespan="on",
        ws="none",
        ssl_certfile=connections.config.ssl_certfile,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )


def listen(config: ServerConfig) -> socket.socket:
    """Return a socket bound to the configured address.

    Raises:
        ConfigError: it cannot be bound.
    """
    if config.uds is not None:
        return _listen_at(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is given.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((config.host, config.port))
    except OSError as error:
        bound.close()
        hint = "; name another port, or 0 for any free one" * (error.errno == errno.EADDRINUSE)
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}{hint}",
            param="port",
        ) from None
    return bound


def _listen_at(path: str) -> socket.socket:
    """Return a bound Unix socket; one that a killed server left behind is replaced."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        bound.bind(path)
    except (OSError, ValueError) as error:
        bound.close()
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on the Unix socket {path}: {why}", param="uds") from None
    return bound


def _is_left_behind(path: str) -> bool:
    """Return True if the path is a Unix socket on which nobody listens."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def close_listener(bound: socket.socket) -> None:
    """Close a socket, and remove the file of a Unix socket."""
    try:
        name = bound.getsockname() if bound.family == socket.AF_UNIX else ""
    except OSError:  # it is closed
        return
    bound.close()
    if name:
        with contextlib.suppress(OSError):
            os.unlink(name)


def url_of(bound: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of a bound socket; that of a Unix socket has nginx's form."""
    scheme = "https" if tls else "http"
    if bound.family == socket.AF_UNIX:
        return f"{scheme}://unix:{bound.getsockname()}:"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the settings of TLS; None: the server speaks plain HTTP.

    Raises:
        ConfigError: a file is missing or does not fit.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secret = config.ssl_keyfile_password or ""
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(config, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name}: there is no file {path}", param=name)
    try:
        # Without a password OpenSSL would ask on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: secret)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "ssl_certfile and ssl_keyfile must be a certificate and its private key in PEM, with "
            f"the right ssl_keyfile_password: {_why(error)}",
            param="ssl_certfile",
        ) from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ssl_ca_certs must be certificates in PEM: {_why(error)}", param="ssl_ca_certs"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
