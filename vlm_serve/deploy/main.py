"""`vlm-serve deploy`: starts Ray and the replicas, and serves until a signal ends it.

SIGUSR1 replaces the replicas one by one while the others answer.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from threading import Lock, Thread
from typing import Any, NoReturn

from vlm_serve.deploy.checks import check
from vlm_serve.deploy.cluster import Cluster, end_on_signals
from vlm_serve.deploy.options import DeployConfig
from vlm_serve.engine.features.adapters.options import named_adapters
from vlm_serve.errors import ConfigError, EngineError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig
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
from vlm_serve.system.extras import install_command

_log = logging.getLogger(__name__)

APPLICATION = "vlm-serve"


def deploy(
    model: str, engine_config: EngineConfig, config: ServerConfig, options: DeployConfig
) -> NoReturn:
    """Run until a signal ends it, and end this process.

    Raises ConfigError or EngineError if it cannot start.
    """
    begin_process(config)
    config = check(options, config, engine_config)
    read_tenant_keys(config.tenant_keys)  # fails early, as a taken port does
    named_adapters(engine_config, config.served_model_name or (model,))
    if find_spec("ray") is None:
        raise ConfigError(
            f"deploy needs the extra `ray`: {install_command('ray')}", param="replicas"
        )
    tls_context(config)
    bound = listen(config)
    end_on_signals(lambda: os._exit(0))  # Nothing has been started yet.
    try:
        # Ray's own handlers raise it too, with a status of their own.
        with contextlib.suppress(SystemExit):
            _run(model, engine_config, config, options, bound)
    finally:
        close_listener(bound)
    # Only threads of Ray are left, and at their side the interpreter's own end may crash.
    logging.shutdown()
    os._exit(0)


def _run(
    model: str,
    engine_config: EngineConfig,
    config: ServerConfig,
    options: DeployConfig,
    bound: socket.socket,
) -> None:
    begun = time.monotonic()
    ranks = engine_config.tensor_parallel_size
    with Cluster(options.most * ranks, config.max_body_bytes) as cluster:
        from ray import serve
        from ray.serve.handle import DeploymentHandle

        from vlm_serve.deploy.gateway import Gateway
        from vlm_serve.deploy.replica import ReplicaSetup
        from vlm_serve.deploy.replica_pool import ReplicaPool
        from vlm_serve.deploy.serving import application, max_open_requests, with_threads

        processors = len(os.sched_getaffinity(0))
        setup = ReplicaSetup(
            model,
            with_threads(engine_config, processors, options.replicas),
            config,
            config.served_model_name or (model,),
            int(time.time()),
            loopback=True,
            folder=os.getcwd(),
        )

        def start(generation: int) -> DeploymentHandle[Any]:
            bound = application(replace(setup, generation=generation), options)
            return serve.run(bound, name=APPLICATION, route_prefix=None)

        _log.info("starting %d replicas of %s", options.replicas, model)
        try:
            handle = start(0)
        except RuntimeError as error:
            raise EngineError(f"the replicas could not be started: {_reason(error)}") from None
        Restarts(start)
        pool = ReplicaPool(handle, options.silence_timeout)
        names = frozenset(adapter.name for adapter in named_adapters(setup.engine))
        gateway = Gateway(
            pool,
            config,
            setup.names[0],
            max_open_requests(setup),
            names,
            allow_weight_updates=engine_config.allow_weight_updates,
        )
        connections = Connections(config)
        rows = list(
            startup_rows(
                setup.names, options, config, url_of(bound, tls=config.ssl_certfile is not None)
            )
        )
        rows.append(("started in", f"{time.monotonic() - begun:.0f} s"))
        server = DrainingServer(
            uvicorn_config(public(gateway, config), connections),
            gateway,
            connections,
            lambda: print_notice(format_table(rows)),
            cluster.leave_at_once,
        )
        server.run(sockets=[bound])


def _reason(error: RuntimeError) -> str:
    """Return the last exception in Serve's report of a failed start."""
    errors = re.findall(r"^(?:\S*\) )?[\w.]*Error: (.+)$", str(error), re.MULTILINE)
    return errors[-1] if errors else str(error)


def startup_rows(
    names: tuple[str, ...], options: DeployConfig, config: ServerConfig, url: str
) -> Iterable[tuple[str, str]]:
    """Yield the rows of the startup table: names and values."""
    yield "model", ", ".join(names)
    grow = f", up to {options.max_replicas}" if options.max_replicas else ""
    yield "replicas", f"{options.replicas}{grow}"
    yield "API keys", str(len(config.api_key)) if config.api_key else "none: open to everyone"
    yield "URL", f"{url}/v1"


class Restarts:
    """Installs the signal handler. A second signal waits for the end of the first restart.

    Args:
        run: starts the replicas of a generation, which replace older ones, and waits for them.
    """

    def __init__(self, run: Callable[[int], object]) -> None:
        self._run = run
        self._generations = itertools.count(1)
        self._restarting = Lock()
        signal.signal(signal.SIGUSR1, lambda number, frame: self._begin())

    def _begin(self) -> None:
        Thread(target=self._restart, name="restart", daemon=True).start()

    def _restart(self) -> None:
        with self._restarting:
            _log.info("replacing the replicas")
            try:
                self._run(next(self._generations))
            except Exception:
                _log.exception("the replicas could not be replaced")
            else:
                _log.info("all replicas have been replaced")
