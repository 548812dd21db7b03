"""Ports that nobody listens on yet."""

from __future__ import annotations

import random
import socket

_BELOW_CLIENTS = (10_000, 30_000)
"""Systems take the ports of connections from above: one of these is still free a while later."""


def free_port() -> int:
    """A port of the loopback interface."""
    while True:
        port = random.SystemRandom().randrange(*_BELOW_CLIENTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
