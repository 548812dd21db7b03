"""What one hostile client does: the form of a case, and how its bytes begin."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from hostile_shares import HOSTILE

Conduct = Literal[
    "whole", "leave", "half", "trickle", "deaf", "silent", "pipelined", "watch", "chain"
]
CONDUCTS: dict[Conduct, int] = {
    "whole": 60,
    "leave": 12,
    "half": 8,
    "trickle": 6,
    "deaf": 6,
    "silent": 2,
    "pipelined": 6,
}
WATCHES: tuple[Conduct, ...] = ("watch", "watch", "leave", "deaf", "half")
"""Conducts at a stream without end; watchers read a while."""
CONTENT_TYPES = ("text/plain", "application/json; charset=utf-16", "", "x" * 500)


@dataclass(frozen=True, slots=True)
class Case:
    """What one hostile client does.

    Attributes:
        seed: makes the same case again.
        kind: what is wrong with what it sends, for the report.
        conduct: how it behaves.
        head: what it sends up to the body.
        body: what follows.
        valid: the bytes are HTTP that must be answered.
        shared: it takes from what API keys share, and a 503 says that its own key has enough.
    """

    seed: int
    kind: str
    conduct: Conduct
    head: bytes
    body: bytes = b""
    valid: bool = True
    shared: bool = False


def head_of(rng: random.Random, method: str, path: str, length: int | None, key: str = "") -> bytes:
    """The head of a request.

    Args:
        length: of a JSON body; None: there is none.
        key: an API key; "": one of those of hostile tenants. A server without keys ignores it.
    """
    lines = [f"{method} {path} HTTP/1.1", "Host: [::1]"]
    if rng.random() < 0.97:
        lines.append(f"Authorization: Bearer {key or rng.choice(HOSTILE)}")
    if rng.random() < 0.05:
        lines.append("X-Request-Id: " + rng.choice(("x" * 5000, "a b", "\u00e9", "-")))
    if length is not None:
        kind = "application/json" if rng.random() < 0.9 else rng.choice(CONTENT_TYPES)
        lines += [f"Content-Type: {kind}", f"Content-Length: {length}"]
    lines += ["Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")
