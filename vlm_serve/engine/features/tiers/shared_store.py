"""Options of the shared store, which several servers use.

Errors that can be found without contacting the store are reported at start-up. The store itself may
become reachable later, so the server starts without it and retries (`cache/tiers/store_calls.py`).
"""

from __future__ import annotations

import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from vlm_serve.cache.tiers.entry import Origin
from vlm_serve.cache.tiers.shared_format import Keyring
from vlm_serve.cache.tiers.sharing import WritableStore
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.system.extras import install_command
from vlm_serve.system.hosts import is_loopback

MIN_KEY_BYTES = 32
DEFAULT_PORT = 6379

_SCHEMES = {"redis": False, "rediss": True, "valkey": False, "valkeys": True}
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_FORM = "redis://, rediss://, valkey:// or valkeys:// and [USER:PASSWORD@]HOST[:PORT][/DB]"


@dataclass(frozen=True)
class SharedAddress:
    """Address of the shared store, with the credentials.

    Attributes:
        connection: arguments of the client.
        secret: content of the key file; empty without one.
        text: the address without user and password.
    """

    connection: dict[str, Any] = field(repr=False)
    secret: bytes = field(repr=False)
    text: str

    def open(
        self,
        config: EngineConfig,
        origin: Origin,
        size_of: Callable[[Any, int], int | None],
    ) -> WritableStore:
        """Return the store as a tier; it connects on first use."""
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        from vlm_serve.cache.tiers.shared import SharedStore

        # After a restart of the store, old connections are broken; one retry makes a new one. The
        # tier has its own time limits for a whole request.
        client = Redis(
            **self.connection,
            retry=Retry(NoBackoff(), 1),
            socket_timeout=None,
            socket_connect_timeout=None,
            protocol=2,
        )
        return SharedStore(
            client,
            Keyring(self.secret, origin),
            size_of,
            time_limit=config.shared_store_timeout,
            lifetime=config.shared_store_ttl,
            place=self.text,
        )


def read_address(config: EngineConfig) -> SharedAddress | None:
    """Read the address from the options; return None without a shared store.

    Raises:
        ConfigError: the address or the key file is invalid; one sentence.
    """
    if config.shared_store is None or not config.enable_prefix_caching:
        return None
    try:
        url = urlsplit(config.shared_store)
        host, port = url.hostname, url.port or DEFAULT_PORT
        (host or "").encode("idna")  # the resolver encodes it likewise
        database = int(url.path.strip("/") or "0")
        query = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
    except ValueError:
        raise _invalid(f"must be {_FORM}") from None
    if url.scheme not in _SCHEMES or not host or url.fragment or not 0 <= database < 1 << 16:
        raise _invalid(f"must be {_FORM}")
    unknown = sorted(query.keys() - set(_FILES))
    if unknown:
        raise _invalid(f"has a parameter {unknown[0]!r}; known ones are {', '.join(_FILES)}")
    with_tls = _SCHEMES[url.scheme]
    if query and not with_tls:
        raise _invalid(f"has a parameter {next(iter(query))!r}, which requires TLS")
    is_local = is_loopback(host)
    if not (is_local or with_tls or config.shared_store_insecure):
        raise _invalid(
            "is on another machine: use rediss:// or valkeys:// (TLS), or allow plain text with "
            "shared_store_insecure"
        )
    if not is_local and config.shared_store_key_file is None:
        raise ConfigError(
            "shared_store_key_file is needed, since the shared store is on another machine",
            param="shared_store_key_file",
        )
    secret = b""
    if config.shared_store_key_file is not None:
        secret = _read_key(Path(config.shared_store_key_file).expanduser())
    connection: dict[str, Any] = {"host": host, "port": port, "db": database}
    for name, value in (("username", url.username), ("password", url.password)):
        if value:
            connection[name] = unquote(value)
    if with_tls:
        connection |= {
            "ssl": True,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            **query,
        }
    shown = f"[{host}]" if ":" in host else host
    text = f"{url.scheme}://{shown}:{port}/{database}"
    return SharedAddress(connection, secret, text)


def find_store(config: EngineConfig) -> SharedAddress | None:
    """Read the address and check the client package and the certificates. The store is not
    contacted.

    Raises:
        ConfigError: as `read_address`, and if the client is missing or certificates are unusable.
    """
    address = read_address(config)
    if address is None:
        return None
    try:
        for name in ("redis", "redis.asyncio"):
            import_module(name)
    except ImportError:
        raise _invalid(f"needs the package redis: {install_command('store')}") from None
    _check_certificates(address.connection)
    return address


def _check_certificates(connection: dict[str, Any]) -> None:
    """Check the certificates; raise ConfigError that names the parameter with an unusable file."""
    given = {name: connection[name] for name in _FILES if name in connection}
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise _invalid("has a parameter 'ssl_keyfile' without 'ssl_certfile'")
    for name, path in given.items():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            Path(path).read_bytes()
            if name == "ssl_ca_certs":
                context.load_verify_locations(path)
            elif name == "ssl_certfile":
                context.load_cert_chain(path, given.get("ssl_keyfile"), _no_password)
        except (OSError, ValueError) as error:
            raise _invalid(
                f"has a parameter {name!r} that cannot be used: {_line(error)}"
            ) from None


def _no_password() -> str:
    """Return an empty password for an encrypted key, instead of prompting at the terminal."""
    return ""


def _read_key(path: Path) -> bytes:
    """Return the content of the key file without its line ending."""
    param = "shared_store_key_file"
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"{param} cannot be read: {error}", param=param) from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(
            f"{param} can be read or written by every user of this machine: chmod o= {path}",
            param=param,
        )
    if len(secret) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{param} must hold at least {MIN_KEY_BYTES} bytes, got {len(secret)}", param=param
        )
    return secret


def _invalid(problem: str) -> ConfigError:
    return ConfigError(f"shared_store {problem}", param="shared_store")


def _line(error: Exception) -> str:
    """Return the message of an exception on one line, without its number."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
