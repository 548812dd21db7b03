"""Options of the HTTP server, from which its flags and the documentation's tables are made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from vlm_serve.options import normalise_all, refuse, section

_server = section("server")
_limits = section("limits")
_life = section("life cycle")

_COLLECTOR = "http://127.0.0.1:4318/v1/traces"
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True)
class ServerConfig:
    """Options of one server, validated together when it is built.

    Raises:
        ConfigError: names every invalid option, not only the first one.
    """

    host: str = _server("127.0.0.1", "address to listen on")
    port: int = _server(8000, "port to listen on; 0 takes any free one", low=0, high=65535)
    served_model_name: tuple[str, ...] = _server(
        (),
        "name or names under which requests may ask for the model (comma-separated)",
        default_text="the model as given",
    )
    api_key: tuple[str, ...] = _server(
        (), "keys of which a request must bring one as a bearer token (comma-separated)"
    )
    tenant_keys: str | None = _server(
        None,
        "YAML file of further API keys, each with the cache salt that its requests always have",
        metavar="FILE",
    )
    page: bool = _server(True, "serve the page at /: chat, and what the cache does")
    allowed_hosts: tuple[str, ...] = _server(
        (),
        "names that requests may give as their Host, besides loopback's (comma-separated); "
        "* allows all",
        default_text="none; on another address than loopback a server takes any name",
    )
    allowed_origins: tuple[str, ...] = _server(
        (),
        "origins of other websites whose scripts may use this server (comma-separated or as JSON); "
        "* allows all",
    )
    allowed_methods: tuple[str, ...] = _server(
        ("*",), "methods that they may use", default_text="all"
    )
    allowed_headers: tuple[str, ...] = _server(
        ("*",), "headers that they may send", default_text="all"
    )
    allow_credentials: bool = _server(False, "let them send cookies and the like")
    tool_call_parser: str = _server(
        "auto",
        "form of tool calls in the answers: auto is the one that the chat template asks for",
        choices=("auto", "qwen3_xml", "hermes", "none"),
    )
    reasoning_parser: str = _server(
        "none",
        "qwen3 moves what stands before </think> into the field `reasoning`",
        choices=("none", "qwen3"),
    )
    otlp_traces_endpoint: str | None = _server(
        None,
        "URL to which OpenTelemetry traces are sent (OTLP over HTTP); needs the extra `otel`",
        metavar="URL",
    )
    max_queued_requests: int = _limits(
        256, "requests that may be open beyond max_num_seqs; more are answered 503 at once", low=0
    )
    max_queued_tokens: int = _limits(
        4_000_000,
        "prompt tokens of all open requests beyond which new ones are answered 503 at once",
        low=1,
    )
    max_body_size: int | str = _limits(64 << 20, "largest request body", low=1)
    response_store: int | str | None = _limits(
        None,
        "memory in which /v1/responses keeps answers for later turns, for each API key",
        low=1,
        default_text="none: nothing is kept",
    )
    response_store_ttl: float = _limits(
        86_400.0, "seconds that such an answer is kept", low=0.001, metavar="SECONDS"
    )
    max_request_memory: int | str = _limits(
        1 << 30,
        "memory that the bodies of all open requests may take, as JSON is held; more wait unread",
        low=1,
    )
    max_connections: int = _limits(
        1024, "open connections; a further one closes the longest idle one", low=1
    )
    header_timeout: float = _limits(
        10.0,
        "seconds that a client has for a request's head, and for the first bytes of its body",
        low=0.001,
        metavar="SECONDS",
    )
    min_body_rate: int | str = _limits(
        64 << 10,
        "bytes a second that a body must come with after the first header_timeout seconds",
        low=1,
    )
    send_timeout: float = _limits(
        30.0,
        "seconds in which a client must take 64 KiB of an answer that waits for it, or all of it",
        low=0.001,
        metavar="SECONDS",
    )
    keep_alive_timeout: int = _limits(
        75, "seconds after which a connection without a request is closed", low=1, metavar="SECONDS"
    )
    request_timeout: float | None = _limits(
        None, "seconds after which a request is ended with an error", low=0.001, metavar="SECONDS"
    )
    preprocess_threads: int = _limits(
        4, "threads that render templates and split text into tokens", low=1, high=256
    )
    shutdown_timeout: float = _life(
        30.0,
        "seconds that running requests have after SIGTERM; a second SIGTERM ends at once",
        low=0.0,
        metavar="SECONDS",
    )
    idle_check: bool = _life(
        True,
        "check the cache's invariants whenever no request has been open for a while; one that "
        "comes ends the check",
    )

    def __post_init__(self) -> None:
        refuse(
            normalise_all(self)
            or [
                f"allowed_origins must be origins such as https://example.com, got {origin!r}"
                for origin in self.allowed_origins
                if not _ORIGIN.fullmatch(origin)
            ]
            or [
                f"otlp_traces_endpoint must be a URL such as {_COLLECTOR}, got {endpoint!r}"
                for endpoint in [self.otlp_traces_endpoint]
                if endpoint is not None and not _is_http_url(endpoint)
            ]
        )

    @property
    def max_body_bytes(self) -> int:
        assert isinstance(self.max_body_size, int)
        return self.max_body_size

    @property
    def max_request_bytes(self) -> int:
        assert isinstance(self.max_request_memory, int)
        return self.max_request_memory

    @property
    def min_body_rate_bytes(self) -> int:
        assert isinstance(self.min_body_rate, int)
        return self.min_body_rate


def _is_http_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False
