"""Options of the HTTP server, the source of its flags and of the documentation's table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from vlm_serve.options.declared import normalise_all, options_of, refuse, section

_server = section("server")
_limits = section("limits")
_life = section("life cycle")

_COLLECTOR = "http://127.0.0.1:4318/v1/traces"
_ROOT = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+", re.ASCII)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True)
class ServerConfig:
    """Options of one server, validated together when it is built.

    Raises:
        ConfigError: names every invalid option, not only the first one.
    """

    host: str = _server("127.0.0.1", "address to listen on")
    port: int = _server(8000, "port to listen on; 0 takes any free one", low=0, high=65535)
    uds: str | None = _server(
        None,
        "Unix socket to listen on, instead of host and port; umask decides who may connect",
        metavar="PATH",
    )
    ssl_certfile: str | None = _server(
        None, "certificate chain in PEM: the server speaks HTTPS", metavar="FILE"
    )
    ssl_keyfile: str | None = _server(
        None,
        "private key of ssl_certfile, in PEM",
        metavar="FILE",
        default_text="in ssl_certfile",
    )
    ssl_keyfile_password: str | None = _server(
        None, "password of an encrypted private key", metavar="TEXT"
    )
    ssl_ca_certs: str | None = _server(
        None,
        "certificates in PEM, one of which must have signed the certificate of every client",
        metavar="FILE",
        default_text="none: clients need no certificate",
    )
    root_path: str = _server(
        "",
        "path prefix, such as /vlm, that a proxy in front does not remove from requests",
        metavar="PATH",
        default_text="none",
    )
    log_level: str = _server(
        "info",
        "least severe messages to log",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    access_log: bool = _server(True, "log a line for each finished request")
    served_model_name: tuple[str, ...] = _server(
        (),
        "name or names of the model in requests (comma-separated)",
        default_text="the model as given",
    )
    api_key: tuple[str, ...] = _server(
        (), "accepted API keys; a request must send one as a bearer token (comma-separated)"
    )
    tenant_keys: str | None = _server(
        None,
        "YAML file of further API keys, each with a fixed cache salt for its requests and a weight",
        metavar="FILE",
    )
    page: bool = _server(True, "serve the web page at /, with a chat and views of the cache")
    allowed_hosts: tuple[str, ...] = _server(
        (),
        "accepted Host headers besides those of loopback (comma-separated); * allows all",
        default_text="none; all if the server listens on another address than loopback",
    )
    allowed_origins: tuple[str, ...] = _server(
        (),
        "CORS: origins whose scripts may use this server (comma-separated or JSON); * allows all",
    )
    allowed_methods: tuple[str, ...] = _server(
        ("*",), "CORS: methods for these origins", default_text="all"
    )
    allowed_headers: tuple[str, ...] = _server(
        ("*",), "CORS: request headers for these origins", default_text="all"
    )
    allow_credentials: bool = _server(
        False, "CORS: let these origins send credentials such as cookies"
    )
    allow_runtime_lora: bool = _server(
        False,
        "let POST /v1/load_lora_adapter and /v1/unload_lora_adapter change the adapters; needs "
        "allowed_lora_path",
    )
    allowed_lora_path: str | None = _server(
        None, "folder below which adapters may be loaded at run time", metavar="DIR"
    )
    allowed_weights_path: str | None = _server(
        None,
        "folder below which POST /update_weights_from_disk may take weights; needs "
        "allow_weight_updates",
        metavar="DIR",
    )
    tool_call_parser: str = _server(
        "auto",
        "format of tool calls in answers; auto: the format that the chat template asks for",
        choices=("auto", "qwen3_xml", "minicpm5", "hermes", "none"),
        synonyms={"qwen3_coder": "qwen3_xml", "qwen3coder": "qwen3_xml"},
    )
    reasoning_parser: str = _server(
        "auto",
        "how thoughts are split off into the field `reasoning`; qwen3: between <think>, in the "
        "prompt or the answer, and </think>; deepseek_r1: all text before </think>; auto: qwen3 if "
        "the chat template knows these marks, else none",
        choices=("auto", "qwen3", "deepseek_r1", "none"),
        synonyms={"qwen-qwq": "qwen3"},
    )
    otlp_traces_endpoint: str | None = _server(
        None, "URL for OpenTelemetry traces (OTLP over HTTP); needs the extra `otel`", metavar="URL"
    )
    max_queued_requests: int = _limits(
        256, "maximum open requests beyond max_num_seqs; further ones get 503 at once", low=0
    )
    max_queued_tokens: int = _limits(
        4_000_000,
        "maximum prompt tokens of all open requests; beyond it, new requests get 503 at once",
        low=1,
    )
    max_body_size: int | str = _limits(64 << 20, "maximum size of a request body", low=1)
    response_store: int | str | None = _limits(
        None,
        "memory per API key for answers that /v1/responses keeps for later turns; 0: none is kept",
        low=0,
        default_text="64MiB; 0 with several replicas",
    )
    response_store_ttl: float = _limits(
        86_400.0, "seconds that /v1/responses keeps an answer", low=0.001, metavar="SECONDS"
    )
    media_store: int | str | None = _limits(
        None,
        "memory per API key for media that later requests name by uuid or hash; 0: none is held",
        low=0,
        default_text="64MiB; 0 with several replicas",
    )
    batch_store: int | str | None = _limits(
        None,
        "disk space per API key for /v1/files and the results of /v1/batches",
        low=1,
        default_text="none: no files, no batches",
    )
    media_files: int | str | None = _limits(
        None,
        "disk space per API key for pictures, videos and PDF documents of /v1/files",
        low=1,
        default_text="none: no files of media",
    )
    max_request_memory: int | str = _limits(
        1 << 30,
        "maximum memory for the parsed bodies of all open requests; further bodies wait unread",
        low=1,
    )
    max_connections: int = _limits(
        1024, "maximum open connections; a further one closes the longest idle connection", low=1
    )
    header_timeout: float = _limits(
        10.0,
        "seconds that a client has to send a request's head, and the first bytes of its body",
        low=0.001,
        metavar="SECONDS",
    )
    min_body_rate: int | str = _limits(
        64 << 10,
        "minimum bytes per second of a body, after the first header_timeout seconds",
        low=1,
    )
    send_timeout: float = _limits(
        30.0,
        "seconds that a client has to read 64 KiB of a waiting response, or the rest of it",
        low=0.001,
        metavar="SECONDS",
    )
    keep_alive_timeout: int = _limits(
        75, "seconds until an idle connection is closed", low=1, metavar="SECONDS"
    )
    request_timeout: float | None = _limits(
        None, "seconds until a request is aborted with an error", low=0.001, metavar="SECONDS"
    )
    stream_silence: float = _limits(
        5.0,
        "seconds of silence, in the queue or while a prompt is computed, after which a stream gets "
        "its status and a comment (/v1/messages: a ping), again and again; 0: never",
        low=0.0,
        metavar="SECONDS",
    )
    stream_interval: float = _limits(
        0.0,
        "milliseconds from one event of a stream to the next at least: tokens that come earlier "
        "share one; the first token and the end do not wait. With 0 tokens share an event only "
        "where the stream is behind",
        low=0.0,
        high=60_000.0,
        metavar="MS",
    )
    preprocess_threads: int = _limits(
        4, "threads that render chat templates and tokenize", low=1, high=256
    )
    engine_process: str = _life(
        "auto",
        "run the engine in a process of its own, so that HTTP and media take none of its time; "
        "auto: on with a GPU; not for `deploy`",
        choices=("auto", "on", "off"),
    )
    shutdown_timeout: float = _life(
        30.0,
        "seconds that running requests get after SIGTERM; a second SIGTERM stops at once",
        low=0.0,
        metavar="SECONDS",
    )
    idle_check: bool = _life(
        True,
        "check the cache's invariants while the server is idle; a new request interrupts the check",
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
            or [
                f"{name} needs ssl_certfile"
                for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")
                if getattr(self, name) is not None and self.ssl_certfile is None
            ]
            or [
                "allow_runtime_lora and allowed_lora_path have an effect together only"
                for _ in range(self.allow_runtime_lora != (self.allowed_lora_path is not None))
            ]
            or [
                f"root_path must be a path such as /vlm, got {path!r}"
                for path in [self.root_path]
                if path and not _ROOT.fullmatch(path)
            ]
        )

    @property
    def response_store_bytes(self) -> int:
        assert not isinstance(self.response_store, str)
        return 64 << 20 if self.response_store is None else self.response_store

    @property
    def media_store_bytes(self) -> int:
        assert not isinstance(self.media_store, str)
        return 64 << 20 if self.media_store is None else self.media_store

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


SPLITTING = tuple(
    option for option in options_of(ServerConfig) if option.name == "reasoning_parser"
)
"""The option of the server that answers without one follow too, in Python and on the command
line."""
