"""`vlm-serve serve`: load a model, print a summary, and serve until stopped."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.adapters.options import named_adapters
from vlm_serve.engine.remote.engine import RemoteEngine
from vlm_serve.engine.start.build import device_of
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import format_size
from vlm_serve.server.answers.pieces import form_of, reasoning_form
from vlm_serve.server.app import create_routes
from vlm_serve.server.bounds import total
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.browsers import is_unguarded
from vlm_serve.server.http.connections import Connections
from vlm_serve.server.http.serving import (
    DrainingServer,
    begin_process,
    close_listener,
    format_table,
    listen,
    print_notice,
    public,
    tls_context,
    url_of,
    uvicorn_config,
)
from vlm_serve.server.http.tenants import read_tenant_keys
from vlm_serve.server.service import Mount, Service
from vlm_serve.system.collector import freeze_startup_objects
from vlm_serve.system.extras import install_command
from vlm_serve.system.host_memory import retain_freed_memory

if TYPE_CHECKING:
    from vlm_serve.server.tracing import RequestTracer

_log = logging.getLogger(__name__)

OPEN_TO_ALL = (
    "everybody who can reach this address can use the page, and see and empty the cache: "
    "set --api-key, listen on loopback, or use --no-page"
)


def serve(
    model: str, engine_config: EngineConfig, config: ServerConfig, mounts: Sequence[Mount] = ()
) -> int:
    """Serve a model until a signal arrives or the engine ends; return the exit status: 0 or 1.

    Args:
        mounts: see `Service`.

    Raises:
        ConfigError, CheckpointError: the server cannot start; nothing listens.
    """
    names = config.served_model_name or (model,)
    named_adapters(engine_config, names)  # fail before anything is changed
    if device_of(engine_config.device).type == "cpu":
        retain_freed_memory()  # before the first other thread, which would begin a second heap
    begin_process(config)
    read_tenant_keys(config.tenant_keys)  # fail before the model is loaded
    tls = tls_context(config) is not None
    bound = listen(config)  # fail before the model is loaded
    _log.info("loading %s", model)
    try:
        engine = start_engine(model, engine_config, config)
    except BaseException:
        close_listener(bound)
        raise
    if is_open_to_all(config):
        _log.warning("%s", OPEN_TO_ALL)
    for sentence in absent_folders(engine_config, config):
        _log.warning("%s", sentence)
    try:
        rows = list(startup_rows(engine, config, names, url_of(bound, tls=tls)))
        announce = partial(print_notice, format_table(rows))
        server = make_server(engine, config, names, announce, _leave_at_once, mounts)
        server.service.grammars.warm_up()
        freeze_startup_objects()
        ended = stop_with_engine(server, engine)
        server.run(sockets=[bound])
    finally:
        close_listener(bound)
        engine.close()
    return 1 if ended.is_set() else 0


def start_engine(model: str, engine_config: EngineConfig, config: ServerConfig) -> Engine:
    """Return an engine in this process, or what stands for one in a process of its own. Raise as
    `Engine.from_checkpoint` does."""
    on_gpu = device_of(engine_config.device).type != "cpu"
    if config.engine_process == "on" or (config.engine_process == "auto" and on_gpu):
        return cast("Engine", RemoteEngine(model, engine_config))
    return Engine.from_checkpoint(model, engine_config)


def is_open_to_all(config: ServerConfig) -> bool:
    """Return True if the page, and so the cache, is open to anybody with access to the address."""
    return config.page and is_unguarded(config)


def absent_folders(engine_config: EngineConfig, config: ServerConfig) -> list[str]:
    """Return a sentence for each absent folder of clients' files."""
    folders = {
        "allowed_local_media_path": engine_config.allowed_local_media_path,
        "allowed_lora_path": config.allowed_lora_path,
        "allowed_weights_path": config.allowed_weights_path,
    }
    return [
        f"{name}: there is no folder {folder} now, so requests for its files are refused"
        for name, folder in folders.items()
        if folder is not None and not Path(folder).is_dir()
    ]


def _leave_at_once() -> None:
    """Exit the process at once.

    Tiers survive that as they survive a crash, and child processes end with their pipes.
    """
    _log.warning("stopped by a second signal")
    logging.shutdown()
    os._exit(0)


def startup_rows(
    engine: Engine, config: ServerConfig, names: tuple[str, ...], url: str
) -> Iterable[tuple[str, str]]:
    """Yield the rows of the table printed at startup."""
    traits = engine.preprocessor.template_traits
    yield "model", ", ".join(names)
    yield from engine.rows()
    most = total(config, engine.max_model_len, apart=engine.pid is not None)
    yield "requests", f"at most {format_size(most)} on top"
    parser = config.tool_call_parser
    form = form_of(parser, traits.tool_form)
    yield "tool calls", parser if parser == "none" else form
    yield "reasoning", reasoning_form(config.reasoning_parser, traits)
    if config.response_store_bytes:
        kept = f"{format_size(config.response_store_bytes)} per API key"
        yield "stored responses", f"{kept}, {config.response_store_ttl:g} s, on top"
    if config.media_store_bytes:
        yield "held media", f"{format_size(config.media_store_bytes)} per API key, on top"
    if config.batch_store is not None:
        assert isinstance(config.batch_store, int)
        yield "files and batches", f"{format_size(config.batch_store)} on disk per API key"
    if config.media_files is not None:
        assert isinstance(config.media_files, int)
        yield "files of media", f"{format_size(config.media_files)} on disk per API key"
    yield "API keys", str(len(config.api_key)) if config.api_key else "none: everybody may ask"
    yield "URL", f"{url}/v1"


def _tracer(endpoint: str, model: str) -> RequestTracer:
    """Return the tracer for an OTLP endpoint."""
    try:
        from vlm_serve.server.tracing import RequestTracer
    except ImportError:
        raise ConfigError(
            f"otlp_traces_endpoint needs the extra `otel`: {install_command('otel')}",
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
    settings = uvicorn_config(public(create_routes(service), config), connections)
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
