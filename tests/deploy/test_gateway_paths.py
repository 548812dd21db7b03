"""The gateway refuses odd paths as its replicas do, and sends none of them astray."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import pytest
from fake_engine import FakeEngine
from make_checkpoint import make_checkpoint
from odd_paths import odd_targets, wrong_answers
from serving import WAIT_SECONDS, wait_for
from starlette.types import ASGIApp, Message

from vlm_serve.deploy.gateway import ONE_REPLICA, Gateway
from vlm_serve.deploy.gateway_routes import ROUTES
from vlm_serve.deploy.replica_pool import ReplicaCall, ReplicaPool
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.app import create_routes, routed
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.body import receiver
from vlm_serve.server.http.connections import Connections
from vlm_serve.server.http.serving import DrainingServer, listen, public, url_of, uvicorn_config
from vlm_serve.server.service import Service


class PoolOfOne:
    """Calls the routes of a replica in this process."""

    names = ("r1",)

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def answers(self, call: ReplicaCall) -> AsyncGenerator[Message, None]:
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        await self._app(call.scope, receiver(call.body), send)
        for message in messages:
            yield message


@contextmanager
def serving(gateway: Gateway, config: ServerConfig) -> Iterator[str]:
    """Serves a gateway as `deploy` does; yields its URL."""
    bound, connections = listen(config), Connections(config)
    app = public(gateway, config)
    server = DrainingServer(uvicorn_config(app, connections), gateway, connections)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield url_of(bound)
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        bound.close()


def test_a_gateway_on_a_unix_socket_below_a_path(service: Service, tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "s"), root_path="/vlm", page=False)
    gateway = Gateway(cast(ReplicaPool, PoolOfOne(create_routes(service))), config, "test-model", 9)
    with serving(gateway, config) as url:
        assert url == f"http://unix:{config.uds}:"
        transport = httpx.HTTPTransport(uds=config.uds)
        with httpx.Client(transport=transport, base_url="http://vlm.example") as client:
            for prefix in ("", "/vlm"):
                for route in ("/ping", "/v1/models", "/get_model_info", "/server_info"):
                    assert client.get(prefix + route).status_code == 200, route
                assert client.post(prefix + "/reset_prefix_cache").status_code == 200
                assert client.post(prefix + "/ping").status_code == 200
            answer = client.post("/flush_cache", params={"reset_running_requests": "true"})
            assert answer.status_code == 400
            answer = client.post("/flush_cache", headers={"Origin": "https://evil.example"})
            assert answer.status_code == 403


def test_a_gateway_says_what_a_replica_lacks(service: Service) -> None:
    pool = cast(ReplicaPool, PoolOfOne(create_routes(service)))
    config = ServerConfig(port=0)
    with serving(Gateway(pool, config, "test-model", 8), config) as url:
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        service.engine.degraded = "steps run without CUDA graphs"
        degraded = {"status": "degraded", "reason": "steps run without CUDA graphs"}
        answer = httpx.get(f"{url}/health")
        assert (answer.status_code, answer.json()) == (200, degraded)
        assert httpx.get(f"{url}/ready").status_code == 200


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    engine = FakeEngine(Tokenizer(make_checkpoint(tmp_path)))
    yield Service(engine, ServerConfig(), ("test-model",))  # type: ignore[arg-type]
    engine.close()


def test_odd_paths_of_every_route_are_refused(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    app, config = routed(service), ServerConfig(port=0)
    paths = {route.path for route in app.routes}  # type: ignore[attr-defined]
    assert {path for _, path in ROUTES} <= paths
    assert all(any(path.startswith(each) for path in paths) for each in ONE_REPLICA)
    pool = cast(ReplicaPool, PoolOfOne(create_routes(service)))
    gateway = Gateway(pool, config, "test-model", 8)
    with serving(gateway, config) as url, caplog.at_level(logging.WARNING):
        assert wrong_answers(url, odd_targets(app)) == []
    assert caplog.records == []
