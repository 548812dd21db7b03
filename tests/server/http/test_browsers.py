"""Hosts that a server answers for, and scripts of other origins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from serving import RunningServer, running

from vlm_serve.errors import ConfigError
from vlm_serve.options.declared import options_of
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.browsers import for_browsers, host_name, is_local_name
from vlm_serve.server.main import is_open_to_all

ORIGIN = "https://app.example"


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    options = ServerConfig(port=0, allowed_hosts=("gpu.example",), api_key=("secret",))
    with running(FakeEngine(tokenizer), options) as server:
        yield server


def asked_as(server: RunningServer, host: str, path: str = "/health") -> int:
    return server.client.get(path, headers={"Host": host}).status_code


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "page.localhost", "127.0.0.1", "127.8.9.1:80",
     "[::1]", "[::1]:8000", "gpu.example", "GPU.Example:443"],
)  # fmt: skip
def test_its_own_names_are_answered(server: RunningServer, host: str) -> None:
    assert asked_as(server, host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8000",
     "127.0.0.1@evil.example", "evillocalhost", "192.168.0.5", "[::2]", "[fe80::1]",
     "a.gpu.example", "0.0.0.0", "*", "%6cocalhost"],
)  # fmt: skip
def test_a_rebound_name_is_refused(server: RunningServer, host: str) -> None:
    """Before anything else is asked for, a key too: routes do not tell whether they exist."""
    for path in ("/health", "/", "/v1/models", "/nowhere"):
        answer = server.client.get(path, headers={"Host": host, "Authorization": "Bearer secret"})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert answer.headers["x-request-id"]


def test_a_client_without_a_host_is_no_browser(server: RunningServer) -> None:
    import socket

    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=10) as raw:
        raw.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 200")


def test_every_name_may_be_allowed(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer), ServerConfig(port=0, allowed_hosts=("*",))) as server:
        assert asked_as(server, "anything.example") == 200


def test_a_server_on_another_address_asks_for_no_name() -> None:
    async def app(scope: object, receive: object, send: object) -> None: ...

    assert for_browsers(app, ServerConfig(host="0.0.0.0")) is app
    assert for_browsers(app, ServerConfig(host="0.0.0.0", allowed_hosts=("a.example",))) is not app
    assert for_browsers(app, ServerConfig(host="::1")) is not app


def test_names_and_ports_are_told_apart() -> None:
    assert [host_name(text) for text in ("a:1", "a", "[::1]:80", "[::1]", "")] == [
        "a", "a", "::1", "::1", "",
    ]  # fmt: skip
    assert not is_local_name("") and not is_local_name("1") and is_local_name("::1")
    assert all(map(is_local_name, ("LOCALHOST.", "app.localhost", "127.1.2.3")))


def test_other_origins_may_read_nothing_unless_asked_for(server: RunningServer) -> None:
    answer = server.client.get("/health", headers={"Origin": ORIGIN})
    assert not any(name.startswith("access-control") for name in answer.headers)
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    answer = server.client.options("/v1/chat/completions", headers=preflight)
    assert answer.status_code == 401


def test_a_preflight_needs_no_key(tokenizer: Tokenizer) -> None:
    options = ServerConfig(
        port=0,
        api_key=("secret",),
        allowed_origins=(ORIGIN,),
        allowed_methods=("GET", "POST"),
        allowed_headers=("authorization", "content-type"),
        allow_credentials=True,
    )
    preflight = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with running(FakeEngine(tokenizer), options) as server:
        ask = server.client.options
        answer = ask("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["access-control-allow-methods"] == "GET, POST"
        assert answer.headers["access-control-allow-credentials"] == "true"
        for changed in (
            {"Origin": "https://other.example"},
            {"Access-Control-Request-Method": "DELETE"},
            {"Access-Control-Request-Headers": "x-other"},
        ):
            assert ask("/v1/chat/completions", headers=preflight | changed).status_code == 400
        read = server.client.get("/v1/models", headers={"Origin": ORIGIN})
        assert read.status_code == 401, "what is asked still needs the key"
        assert read.headers["access-control-allow-origin"] == ORIGIN
        strange = server.client.get("/health", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in strange.headers


def test_all_origins_may_be_allowed(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer), ServerConfig(port=0, allowed_origins=("*",))) as server:
        answer = server.client.get("/health", headers={"Origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["example.com", "https://a.example/", "https://", "a b"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="^allowed_origins must be origins"):
        ServerConfig(allowed_origins=(origin,))


def test_lists_are_read_as_vllm_writes_them() -> None:
    (origins,) = (item for item in options_of(ServerConfig) if item.name == "allowed_origins")
    assert origins.parse('["https://a.example", "*"]') == ("https://a.example", "*")
    assert origins.parse("https://a.example, *") == ("https://a.example", "*")
    with pytest.raises(ConfigError, match="^allowed_origins must be a list"):
        origins.parse('["https://a.example"')
    with pytest.raises(ConfigError, match="^allowed_origins must be a list of texts"):
        ServerConfig(allowed_origins=origins.parse("[1]"))


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "192.168.1.2"}, True),
        ({"host": "::"}, True),
        ({"host": "localhost"}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0", "page": False}, False),
        ({"host": "0.0.0.0", "api_key": ("key",)}, False),
        ({"host": "0.0.0.0", "tenant_keys": "keys.yaml"}, False),
    ],
)
def test_who_is_warned(options: dict[str, object], warned: bool) -> None:
    assert is_open_to_all(ServerConfig(**options)) == warned  # type: ignore[arg-type]
