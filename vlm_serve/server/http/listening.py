"""The sockets that a server listens on: TCP or Unix, plain or with TLS."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from pathlib import Path

from vlm_serve.errors import ConfigError
from vlm_serve.server.config import ServerConfig


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
