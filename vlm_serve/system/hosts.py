"""Names and addresses of machines."""

from __future__ import annotations

import ipaddress


def is_loopback(name: str) -> bool:
    """Return True if a host name or address always means the local machine."""
    name = name.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
