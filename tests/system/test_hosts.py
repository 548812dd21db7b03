"""Names and addresses of machines."""

from __future__ import annotations

import pytest

from vlm_serve.system.hosts import is_loopback


@pytest.mark.parametrize("name", ["localhost", "127.1.2.3", "::1"])
def test_names_of_this_machine(name: str) -> None:
    assert is_loopback(name)


@pytest.mark.parametrize(
    "name",
    ["", "1", "localhost.", "db.localhost", "localhost.example", "10.0.0.1", "::", "0.0.0.0"],
)
def test_names_that_a_resolver_may_find_elsewhere(name: str) -> None:
    assert not is_loopback(name)
