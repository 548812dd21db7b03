"""Who a request counts for where requests compete for the model."""

from __future__ import annotations

from typing import NamedTuple

BACKGROUND = 1 << 32
"""Least priority of work that runs behind everybody's requests; no request has as much."""


class Tenant(NamedTuple):
    """A share of the model. Plain data, which the server makes and no client.

    Attributes:
        name: requests of one name have one share.
        weight: size of the share, relative to those of the others; at least 1.
        label: what metrics call it; tenants of one label are counted together.
    """

    name: str = ""
    weight: int = 1
    label: str = ""


NOBODY = Tenant()
"""Of requests that are not told apart."""
