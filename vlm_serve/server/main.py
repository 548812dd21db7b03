"""`vlm-serve serve`: load a model, print a summary, and serve until stopped."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_serve.engine.described import engine_rows
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.adapters.options import named_adapters
from vlm_serve.engine.start.build import device_of
from vlm_serve.engine.start.parts import EngineParts
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
from vlm_serve.system.extras import install_command
from vlm_serve.system.host_memory import retain_freed_memory

if TYPE_CHECKING:
    from vlm_serve.server.tracing import RequestTracer

_log = logging.getLogger(__name__)

COLLECTIONS_BEFORE_A_FULL_ONE = 100
"""Threshold of the garbage collector's oldest generation; Python's default is 10."""
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
        engine = Engine.from_checkpoint(model, engine_config)
    except BaseException:
        close_listener(bound)
        raise
    if is_open_to_all(config):
        _log.warning("%s", OPEN_TO_ALL)
    for sentence in absent_folders(engine_config, config):
        _log.warning("%s", sentence)
    try:
        rows = list(startup_rows(engine.parts, config, names, url_of(bound, tls=tls)))
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


def is_open_to_all(config: ServerConfig) -> bool:
    """Return True if the page, and so the cache, is open to anybody with access to the address."""
    return config.page and is_unguarded(config)


def absent_folders(engine_config: EngineConfig, config: ServerConfig) -> list[str]:
    """Return a sentence for each absent folder of clients' files."""
    folders = {
        "allowed_local_media_path": engine_config.allowed_local_media_path,
        "allowed_lora_path": config.allowed_lora_path,
    }
    return [
        f"{name}: there is no folder {folder} now, so requests for its files are refused"
        for name, folder in folders.items()
        if folder is not None and not Path(folder).is_dir()
    ]


def freeze_startup_objects() -> None:
    """Exempt the objects that exist at startup from garbage collection.

    These are half a million objects of libraries and the model. A full collection of them stops
    every thread for 0.2 s, repeatedly while requests come and go. Collecting newer objects,
    mostly the cache's nodes, takes 20 to 70 ms. It is done ten times less often than by default,
    and when the server is quiet (`upkeep`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], COLLECTIONS_BEFORE_A_FULL_ONE)


def _leave_at_once() -> None:
    """Exit the process at once.

    Tiers survive that as they survive a crash, and child processes end with their pipes.
    """
    _log.warning("stopped by a second signal")
    logging.shutdown()
    os._exit(0)


def startup_rows(
    parts: EngineParts, config: ServerConfig, names: tuple[str, ...], url: str
) -> Iterable[tuple[str, str]]:
    """Yield the rows of the table printed at startup."""
    yield "model", ", ".join(names)
    yield from engine_rows(parts)
    yield "requests", f"at most {format_size(total(config, parts.language.max_length))} on top"
    parser = config.tool_call_parser
    form = form_of(parser, parts.preprocessor.template_traits.tool_form)
    yield "tool calls", parser if parser == "none" else form
    yield "reasoning", reasoning_form(config.reasoning_parser, parts.preprocessor.template_traits)
    if config.response_store_bytes:
        kept = f"{format_size(config.response_store_bytes)} per API key"
        yield "stored responses", f"{kept}, {config.response_store_ttl:g} s, on top"
    if config.batch_store is not None:
        assert isinstance(config.batch_store, int)
        yield "files and batches", f"{format_size(config.batch_store)} on disk per API key"
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
