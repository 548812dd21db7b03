"""What a server says of its memory, and how much of its growth that explains.

Resident memory is that of an idle server after its warm-up, plus what `held_bytes` has grown by,
plus what its C library has free: to within a twentieth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

SHARE = 20
"""What has no name is at most one part in this many of the resident memory."""
MIB = 1 << 20


@dataclass(frozen=True)
class Ledger:
    """What /server_info says.

    Attributes:
        resident: bytes of the server's process, without its children.
        free: of these, bytes that its C library has free; None: it cannot be asked.
        held: bytes by what keeps them.
    """

    resident: int
    free: int | None
    held: Mapping[str, int]

    def grown(self, before: Ledger) -> int:
        """Return the bytes that `held_bytes` and free memory have grown by."""
        held = sum(self.held.values()) - sum(before.held.values())
        return held + (self.free or 0) - (before.free or 0)

    def unexplained(self, before: Ledger) -> int:
        """Return the bytes of growth without a name; below 0: names for more than has grown."""
        return self.resident - before.resident - self.grown(before)

    def explained(self, before: Ledger) -> bool:
        return abs(self.unexplained(before)) * SHARE <= self.resident


def ledger_of(said: Mapping[str, Any]) -> Ledger | None:
    """Return the ledger of an answer of /server_info; None: it has none, as a gateway's."""
    memory = said.get("memory")
    if memory is None or memory["resident_bytes"] is None:
        return None
    return Ledger(memory["resident_bytes"], memory["allocator_free_bytes"], memory["held_bytes"])


def read_ledger(url: str) -> Ledger | None:
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
        return ledger_of(client.get("/server_info").json())


def table(before: Ledger, now: Ledger) -> Iterator[str]:
    """Yield lines: what there was, what has grown, and what is left without a name, in MiB."""

    def line(name: str, then: int | None, size: int | None) -> str:
        if then is None or size is None:
            return f"{name:<22} {'unknown':>9}"
        return f"{name:<22} {then / MIB:9.1f} {size / MIB:9.1f} {(size - then) / MIB:+9.1f}"

    yield f"{'MiB':<22} {'idle':>9} {'now':>9} {'grown':>9}"
    for kind in sorted(now.held, key=lambda kind: before.held[kind] - now.held[kind]):
        yield line(kind, before.held[kind], now.held[kind])
    yield line("free in the C library", before.free, now.free)
    yield line("resident", before.resident, now.resident)
    left = now.unexplained(before)
    share = f"{100 * left / now.resident:+.1f} % of resident"
    yield f"{'without a name':<22} {'':>9} {'':>9} {left / MIB:+9.1f}  {share}"
