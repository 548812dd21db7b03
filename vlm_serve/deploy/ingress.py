"""The gateway as a Serve application behind Serve's own HTTP proxy: for KubeRay.

The proxy handles connections, so our limits on them do not apply: there are no deadlines for heads
and bodies and no connection limit, and a body is read before it is counted. Keys, tenants, the
limits of open requests and of body sizes apply as with `vlm-serve deploy`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from vlm_serve.deploy.checks import check
from vlm_serve.deploy.gateway import Gateway
from vlm_serve.deploy.options import DeployConfig
from vlm_serve.deploy.replica import ReplicaSetup
from vlm_serve.deploy.replica_pool import ReplicaPool
from vlm_serve.deploy.serving import application, max_open_requests
from vlm_serve.engine.features.adapters.options import named_adapters
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import from_mapping, options_of
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.serving import public
from vlm_serve.server.http.tenants import read_tenant_keys

CONFIGS = (DeployConfig, ServerConfig, EngineConfig)
PROXY_HOST = "0.0.0.0"
"""Serve decides where its proxy listens, so keys are required as if it were everywhere."""


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application of `import_path: vlm_serve.deploy:app`.

    Args:
        args: `model`, `fronts` (number of gateways) and any option of `vlm-serve deploy`, as in a
            configuration file.

    Raises ConfigError, naming the bad option.
    """
    given = dict(args)
    model, fronts = str(given.pop("model", "demo")), given.pop("fronts", 1)
    if not isinstance(fronts, int) or fronts < 1:
        raise ConfigError(f"fronts must be a positive integer, got {fronts!r}", param="fronts")
    for name in ("uds", "ssl_certfile"):
        if given.get(name) or given.get(name.replace("_", "-")):
            raise ConfigError(f"{name} has no effect here: Serve's proxy listens", param=name)
    given["host"] = PROXY_HOST
    options = from_mapping([item for config in CONFIGS for item in options_of(config)], given)
    deploy, server, engine = (
        config(
            **{item.name: options[item.name] for item in options_of(config) if item.name in options}
        )
        for config in CONFIGS
    )
    assert isinstance(deploy, DeployConfig)
    assert isinstance(server, ServerConfig) and isinstance(engine, EngineConfig)
    if engine.allow_weight_updates:
        problem = "is for `vlm-serve deploy`: several gateways could not give orders at once"
        raise ConfigError(f"allow_weight_updates {problem}", param="allow_weight_updates")
    server = check(deploy, server, engine)
    read_tenant_keys(server.tenant_keys)
    setup = ReplicaSetup(
        model, engine, server, server.served_model_name or (model,), int(time.time())
    )
    named_adapters(engine, setup.names)
    gateways: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="front",  # as KubeRay users know it
        num_replicas=fronts,
        max_ongoing_requests=server.max_connections,
        ray_actor_options={"num_cpus": 1},
        logging_config={"enable_access_log": False},
    )
    bound: serve.Application = gateways.bind(application(setup, deploy), setup, deploy)
    return bound


class Ingress:
    """A Serve deployment; each of its replicas is a gateway."""

    def __init__(
        self, handle: DeploymentHandle[Any], setup: ReplicaSetup, deploy: DeployConfig
    ) -> None:
        pool = ReplicaPool(handle, deploy.silence_timeout)
        self._config = setup.server
        names = frozenset(adapter.name for adapter in named_adapters(setup.engine))
        self._gateway = Gateway(pool, setup.server, setup.names[0], max_open_requests(setup), names)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return public(self._gateway, self._config)
