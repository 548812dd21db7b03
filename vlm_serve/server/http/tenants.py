"""Tenants: whom requests count for, with what weight, and what a share of a limit is.

A tenant is an API key. Without keys it is the client's address, so everybody behind a proxy or a
Unix socket is one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vlm_serve.engine.requests.tenant import NOBODY, Tenant
from vlm_serve.errors import ConfigError
from vlm_serve.options.declared import read_mapping

MAX_WEIGHT = 1000
"""Weight of a tenant at most."""
TENANT_STATE = "tenant"
"""Key in the state of a request's scope, where no client can write."""
_SALT = re.compile(r"[A-Za-z0-9._:=+/@-]{1,100}", re.ASCII)
_PREFIX_BITS = 64
"""Bits of an IPv6 address that name a site: all addresses behind them may be one client's."""


class TenantKey(NamedTuple):
    """What `--tenant-keys` says of an API key."""

    salt: str
    weight: int = 1


def read_tenant_keys(path: str | None) -> dict[str, TenantKey]:
    """Return the API keys of a YAML file with their salts and weights.

    Raises:
        ConfigError: the file is bad. The message never contains a key.
    """
    if path is None:
        return {}
    place, expected = f"tenant_keys {path}", "it must map keys to salts"
    content = read_mapping(path, place, "tenant_keys", expected)
    if not content:
        raise ConfigError(f"{place}: {expected}", param="tenant_keys")
    keys = {}
    for number, (key, value) in enumerate(content.items(), start=1):
        fields = value if isinstance(value, dict) else {"salt": value}
        salt, weight = fields.get("salt"), fields.get("weight", 1)
        if not (isinstance(key, str) and key and isinstance(salt, str) and _SALT.fullmatch(salt)):
            raise ConfigError(
                f"{place}: entry {number} must map a text to a salt of at most 100 letters, digits "
                "or ._:=+/@- (numbers need quotes), or to {salt: ..., weight: ...}",
                param="tenant_keys",
            )
        if type(weight) is not int or not 1 <= weight <= MAX_WEIGHT:
            raise ConfigError(
                f"{place}: the weight of entry {number} must be a whole number from 1 to "
                f"{MAX_WEIGHT}",
                param="tenant_keys",
            )
        if fields.keys() - {"salt", "weight"}:
            raise ConfigError(
                f"{place}: entry {number} may have a salt and a weight and nothing else",
                param="tenant_keys",
            )
        keys[key] = TenantKey(salt, weight)
    return keys


def tenants_of_keys(
    api_keys: Iterable[str], tenant_keys: Mapping[str, TenantKey]
) -> dict[str, Tenant]:
    """Return the tenant of each API key. Names count the keys, and show nothing of them."""
    tenants = {}
    for number, key in enumerate(api_keys, start=1):
        tenants[key] = Tenant(f"api_key {number}", 1, f"api_key {number}")
    for number, (key, (_, weight)) in enumerate(tenant_keys.items(), start=1):
        tenants[key] = Tenant(f"tenant {number}", weight, f"tenant {number}")
    return tenants


def tenant_at(client: tuple[str, int] | None) -> Tenant:
    """Return the tenant of a client without a key: its address, of IPv6 the first 64 bits. All
    addresses have one label."""
    host = client[0] if client else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return Tenant(f"address {host}", 1, "addresses")
    if address.version == 6 and address.ipv4_mapped is None:
        site = int(address) >> _PREFIX_BITS << _PREFIX_BITS
        address = ipaddress.IPv6Address(site)
    return Tenant(f"address {address}", 1, "addresses")


def tenant_of(scope: Any) -> Tenant:
    """Return whom a request counts for, as authentication has found it."""
    tenant: Tenant = scope.get("state", {}).get(TENANT_STATE, NOBODY)
    return tenant


class Places:
    """What tenants hold of something limited."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, int]] = {}

    def add(self, tenant: Tenant, amount: int) -> None:
        """Add to what a tenant holds; a negative amount takes away."""
        held = self._held.get(tenant.name, (0, 0))[0] + amount
        if held:
            self._held[tenant.name] = held, tenant.weight
        else:
            self._held.pop(tenant.name, None)

    def may_add(self, tenant: Tenant, held: int, limit: int) -> bool:
        """Return True below a limit. Where it is reached, a tenant may still have its share of it,
        as long as all together hold less than twice the limit.

        Args:
            held: what all hold.
        """
        if held < limit:
            return True
        own = self._held.get(tenant.name, (0, 0))[0]
        others = sum(weight for name, (_, weight) in self._held.items() if name != tenant.name)
        return own * (tenant.weight + others) < limit * tenant.weight and held < 2 * limit
