"""Unix sockets, TLS, and what proxies in front need."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine
from serving import RunningServer, chat_body, check_chat, running, wait_for

from vlm_serve.deploy.checks import check
from vlm_serve.deploy.options import DeployConfig
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.serving import close_listener, listen
from vlm_serve.server.main import is_open_to_all


def test_a_unix_socket(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "s"
    config = ServerConfig(uds=str(path))
    with running(FakeEngine(tokenizer), config) as server:
        assert server.url == f"http://unix:{path}:"
        assert stat.S_ISSOCK(path.stat().st_mode)
        transport = httpx.HTTPTransport(uds=str(path))
        # A proxy may pass on any name: browsers do not reach a Unix socket.
        with httpx.Client(transport=transport, base_url="http://vlm.example") as client:
            check_chat(client)
            assert client.get("/metrics").status_code == 200
        with pytest.raises(ConfigError, match=f"cannot listen on the Unix socket {path}"):
            listen(config)
        assert path.exists()
    assert not path.exists()


def test_hosts_are_checked_on_a_unix_socket_if_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "s"), allowed_hosts=("vlm.example",))
    with running(FakeEngine(tokenizer), config):
        transport = httpx.HTTPTransport(uds=config.uds)
        with httpx.Client(transport=transport) as client:
            assert client.get("http://vlm.example/health").status_code == 200
            assert client.get("http://other.example/health").status_code == 403


def test_a_socket_that_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    bound = listen(ServerConfig(uds=str(path)))
    close_listener(bound)
    close_listener(bound)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "long", "missing folder", "null"])
def test_what_is_no_unix_socket_is_named_and_left_alone(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / kind.replace(" ", "/"))
    if kind == "file":
        Path(path).write_text("mine")
    elif kind == "folder":
        Path(path).mkdir()
    elif kind == "long":
        path += "x" * 200
    elif kind == "null":
        path += "\0"
    with pytest.raises(ConfigError, match="cannot listen on the Unix socket") as caught:
        listen(ServerConfig(uds=path))
    assert caught.value.param == "uds"
    if kind in ("file", "folder"):
        assert os.path.exists(path)


def test_a_unix_socket_is_not_open_to_all() -> None:
    config = ServerConfig(uds="/run/s", host="0.0.0.0")
    assert not is_open_to_all(config)
    check(DeployConfig(), config, EngineConfig())


@pytest.fixture
def below(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    config = ServerConfig(port=0, root_path="/a/vlm", api_key=("secret",))
    with running(FakeEngine(tokenizer), config) as server:
        yield server


def test_paths_with_and_without_the_root_path(below: RunningServer) -> None:
    headers = {"Authorization": "Bearer secret"}
    for prefix in ("", "/a/vlm"):
        get = below.client.get
        assert get(prefix + "/health").status_code == 200
        assert "<html" in get(prefix + "/").text
        assert get(prefix + "/main.js").status_code == 200
        assert get(prefix + "/v1/models").status_code == 401
        assert get(prefix + "/v1/models", headers=headers).status_code == 200
        assert below.post(prefix + "/v1/chat/completions", chat_body(), headers=headers)
        assert get(prefix + "/nowhere", headers=headers).status_code == 404
    moved = below.client.get("/a/vlm")
    assert (moved.status_code, moved.headers["location"]) == (307, "/a/vlm/")
    for other in ("/a/vlmx/health", "/a/health", "/a/vlm/a/vlm/health", "/a%2Fvlm/health"):
        assert below.client.get(other, headers=headers).status_code == 404


@pytest.mark.parametrize("root", ["vlm", "/", "/vlm/", "/..", "/a//b", "/a b", "/%2e", "//x"])
def test_bad_root_paths_are_named(root: str) -> None:
    with pytest.raises(ConfigError, match="root_path must be a path such as /vlm"):
        ServerConfig(root_path=root)


def test_streams_pass_nginx_at_once(fake: RunningServer) -> None:
    for path, body in (
        ("/v1/chat/completions", chat_body(stream=True)),
        ("/v1/completions", {"prompt": "hi", "stream": True}),
        ("/v1/responses", {"input": "hi", "stream": True}),
        ("/v1/messages", chat_body(stream=True, max_tokens=9)),
    ):
        with fake.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["x-accel-buffering"] == "no"
            response.read()
    with fake.client.stream("GET", "/v1/cache/events") as response:
        assert response.headers["x-accel-buffering"] == "no"


def test_without_an_access_log(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    for wanted in (True, False):
        caplog.clear()
        config = ServerConfig(port=0, access_log=wanted)
        with (
            caplog.at_level(logging.INFO, "vlm_serve.access"),
            running(FakeEngine(tokenizer), config) as server,
        ):
            assert server.chat().status_code == 200
            wait_for(lambda: server.service.requests.num_open == 0)
        assert any(each.name == "vlm_serve.access" for each in caplog.records) == wanted
