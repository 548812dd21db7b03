"""Assembling the server of one engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vlm_serve.errors import ConfigError
from vlm_serve.server.app import create_app
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.browsers import for_browsers
from vlm_serve.server.http.connections import Connections
from vlm_serve.server.http.draining import DrainingServer, uvicorn_config
from vlm_serve.server.http.root_path import below_root
from vlm_serve.server.http.tenants import read_tenant_keys
from vlm_serve.server.service import Mount, Service

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine
    from vlm_serve.server.tracing import RequestTracer


def _tracer(endpoint: str, model: str) -> RequestTracer:
    """Return the tracer for an OTLP endpoint."""
    try:
        from vlm_serve.server.tracing import RequestTracer
    except ImportError:
        raise ConfigError(
            "otlp_traces_endpoint needs the extra `otel`: pip install 'vlm-serve[otel]'",
            param="otlp_traces_endpoint",
        ) from None
    return RequestTracer.to_endpoint(endpoint, model)


def make_server(
    engine: Engine,
    config: ServerConfig,
    model_names: tuple[str, ...],
    on_listening: Callable[[], None] = lambda: None,
    on_second_signal: Callable[[], None] = lambda: None,
    mounts: Sequence[Mount] = (),
) -> DrainingServer[Service]:
    """Return a server; start it with `run(sockets=[...])`.

    Args:
        engine: the engine that answers; the server closes it.
        config: the server's options.
        model_names: names under which requests may ask for the model; the first is canonical.
        on_listening: called when the server accepts connections.
        on_second_signal: called when a signal arrives while the server is stopping.
        mounts: see `Service`.

    Raises:
        ConfigError: the file of tenants' keys is bad, or traces cannot be exported.
    """
    service = Service(engine, config, model_names, mounts)
    if config.otlp_traces_endpoint is not None:
        service.state.tracer = _tracer(config.otlp_traces_endpoint, model_names[0])
    connections = Connections(config)
    app = for_browsers(create_app(service, read_tenant_keys(config.tenant_keys)), config)
    settings = uvicorn_config(below_root(app, config.root_path), connections)
    return DrainingServer(settings, service, connections, on_listening, on_second_signal)


def stop_with_engine(server: DrainingServer[Service], engine: Engine) -> threading.Event:
    """Stop the server when its engine ends by itself. Return an event that is set then.

    Without an engine every answer is a 503: whoever supervises the process can start another one.
    """
    ended = threading.Event()

    def wait() -> None:
        engine.wait()
        if server.stop():
            ended.set()

    threading.Thread(target=wait, name="vlm-serve-end", daemon=True).start()
    return ended
