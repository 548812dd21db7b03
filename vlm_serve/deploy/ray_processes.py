"""Which processes Ray starts for a deployment, and that its agents end with their raylet.

Ray has no options for these, so functions of its own are replaced before it starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vlm_serve.deploy.bound_agent import bound_command

ENVIRONMENT = {"RAY_enable_metrics_collection": "0"}
"""Otherwise the agent's metrics answer without the token, on a port of their own."""

_AGENTS = ("dashboard_agent", "runtime_env_agent")


def leave_out_needless() -> None:
    """Have Ray start neither its monitor nor its API server.

    The first asks clouds for machines and the second shows the dashboard. Here both would do
    nothing but answer with their metrics, on two ports and without the token.
    """
    node: Any = import_module("ray._private.node").Node
    for name in ("start_monitor", "start_api_server"):
        assert hasattr(node, name), name
        setattr(node, name, lambda *_, **__: None)


def bind_agents() -> None:
    """Have Ray start its agents by `bound_agent`. Ray itself binds what the driver starts."""
    services: Any = import_module("ray._private.services")
    build = services._build_python_executable_command_memory_profileable

    def with_agents_bound(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component in _AGENTS:
            return bound_command()
        return list(build(component, *arguments, **options))

    services._build_python_executable_command_memory_profileable = with_agents_bound
