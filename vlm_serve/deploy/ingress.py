"""The front as a Serve application, where Serve's own proxy is the server: for KubeRay.

The proxy stands before the front, so what our server does with connections is not done here: no
deadlines for heads and bodies, no limit of connections; and a body is read before it is counted.
Keys, tenants, seats and the size of bodies are as with `vlm-serve deploy`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from vlm_serve.config import EngineConfig
from vlm_serve.deploy.checks import check
from vlm_serve.deploy.fleet import Fleet
from vlm_serve.deploy.front import Front
from vlm_serve.deploy.options import DeployConfig
from vlm_serve.deploy.replica import ReplicaSetup
from vlm_serve.deploy.serving import application, seats_of
from vlm_serve.errors import ConfigError
from vlm_serve.options import from_mapping, options_of
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.auth import guarded
from vlm_serve.server.http.browsers import for_browsers
from vlm_serve.server.http.tenants import read_tenant_keys

CONFIGS = (DeployConfig, ServerConfig, EngineConfig)
PROXY_HOST = "0.0.0.0"
"""Where Serve's proxy listens is its own matter: keys are asked for as if it were everywhere."""


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of `import_path: vlm_serve.deploy:app`.

    Args:
        args: `model`, `fronts` (how many) and any option of `vlm-serve deploy`, as in a
            configuration file.

    Raises ConfigError that names what is wrong.
    """
    given = dict(args)
    model, fronts = str(given.pop("model", "demo")), given.pop("fronts", 1)
    if not isinstance(fronts, int) or fronts < 1:
        raise ConfigError(f"fronts must be a whole number above 0, got {fronts!r}", param="fronts")
    given["host"] = PROXY_HOST
    found = from_mapping([item for config in CONFIGS for item in options_of(config)], given)
    deploy, server, engine = (
        config(**{item.name: found[item.name] for item in options_of(config) if item.name in found})
        for config in CONFIGS
    )
    assert isinstance(deploy, DeployConfig)
    assert isinstance(server, ServerConfig) and isinstance(engine, EngineConfig)
    check(deploy, server, engine)
    read_tenant_keys(server.tenant_keys)
    setup = ReplicaSetup(model, engine, server, server.served_model_name or (model,), _now())
    front: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="front",
        num_replicas=fronts,
        max_ongoing_requests=server.max_connections,
        ray_actor_options={"num_cpus": 1},
        logging_config={"enable_access_log": False},
    )
    made: serve.Application = front.bind(application(setup, deploy), setup, deploy)
    return made


class Ingress:
    """The deployment whose replicas are fronts."""

    def __init__(
        self, handle: DeploymentHandle[Any], setup: ReplicaSetup, deploy: DeployConfig
    ) -> None:
        fleet = Fleet(handle, deploy.silence_timeout)
        self._config = setup.server
        self._front = Front(fleet, setup.server, setup.names[0], seats_of(setup))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        tenants = read_tenant_keys(self._config.tenant_keys)
        return for_browsers(guarded(self._front, self._config, tenants), self._config)


def _now() -> int:
    return int(time.time())
