"""Which addresses belong to the public internet, by a table of our own.

`ipaddress.is_global` follows the table of the Python that runs. Releases before 3.11.10 and 3.12.4
call most of 192.0.0.0/24 global, and a cloud serves credentials there. So media are only fetched
from what IANA's registries of special-purpose addresses leave.
Sources: https://www.iana.org/assignments/iana-ipv4-special-registry and
https://www.iana.org/assignments/iana-ipv6-special-registry.
"""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_SPECIAL_4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
"""No medium lies at the few global addresses among them, such as 192.0.0.9."""
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")
"""All IPv6 addresses that were ever assigned to hosts of the internet."""
_SPECIAL_6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocol assignments, such as Teredo
            "2001:db8::/32",
            "3fff::/20",
        ),
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv4 hosts as seen from an IPv6-only network."""


def is_public(address: Address) -> bool:
    """Return True for a public internet address that embeds no other kind of address."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_4)
    if address in _NAT64:
        return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address.sixtofour is not None and not is_public(address.sixtofour):
        return False
    return address in _UNICAST_6 and not any(address in network for network in _SPECIAL_6)
