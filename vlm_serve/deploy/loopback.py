"""Keeps Ray's processes of one machine on the loopback address."""

from __future__ import annotations

from importlib import import_module
from typing import Any

ENVIRONMENT = {
    # Ray's switch for machines whose firewall asks at every port: its address is 127.0.0.1 then.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
}


def bind_replica() -> None:
    """In the process of a replica, before Serve opens the port for calls between deployments: it
    would listen on all addresses, though nobody here calls it."""
    replica: Any = import_module("ray.serve._private.replica")
    add_port = replica.add_port_to_grpc_server

    def add_loopback_port(server: Any, address: str) -> int:
        return int(add_port(server, address.replace("[::]", "127.0.0.1")))

    replica.add_port_to_grpc_server = add_loopback_port
