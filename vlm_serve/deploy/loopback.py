"""Keeps Ray's processes of one machine on the loopback address."""

from __future__ import annotations

from importlib import import_module
from typing import Any

ENVIRONMENT = {
    # With "0" Ray's node address is 127.0.0.1, as on systems whose firewall prompts for each port.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
}


def bind_replica() -> None:
    """Make Serve's port for calls between deployments listen on loopback; nothing here uses it.

    Serve would listen on all addresses. Call this in a replica's process before Serve opens it.
    """
    replica: Any = import_module("ray.serve._private.replica")
    add_port = replica.add_port_to_grpc_server

    def add_loopback_port(server: Any, address: str) -> int:
        return int(add_port(server, address.replace("[::]", "127.0.0.1")))

    replica.add_port_to_grpc_server = add_loopback_port
