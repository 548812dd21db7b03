"""Names and addresses of machines."""

from __future__ import annotations

import ipaddress


def is_loopback(name: str) -> bool:
    """Return True for `localhost` and loopback addresses, which every resolver finds here."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
