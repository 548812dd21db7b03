"""Hostile requests for shares of API keys: stored chains, grammars, pins, readers, others' parts.

Each makes as much of its kind as one request can. That its own key is refused meanwhile (503) is
right; that others notice is not.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from typing import Any, Literal

from hostile_values import size

Request = tuple[str, str, dict[str, Any] | None]
"""Method, path and body."""
OPERATOR, ORDINARY, HOSTILE = "operator-key", "ordinary-key", ("hostile-key-1", "hostile-key-2")
KEYS_FILE = f"{ORDINARY}: alice\n{HOSTILE[0]}: mallory\n{HOSTILE[1]}: eve\n"
"""Of `--tenant-keys`."""
LONGEST_TTL = 30 * 86_400


def _tenants(rng: random.Random) -> Request:
    """What belongs to another tenant, or to the operator."""
    key = rng.randbytes(32).hex()
    salt = rng.choice(("alice", "tenant:alice", "eve", "tenant:", "x" * 128))
    messages = [{"role": "user", "content": "x"}]
    return rng.choice(
        (
            ("POST", "/v1/chat/completions", {"messages": messages, "cache_salt": salt}),
            ("POST", "/v1/cache/probe", {"messages": messages, "cache_salt": salt}),
            ("POST", "/v1/cache/flush", {}),
            ("POST", "/flush_cache", None),
            ("GET", "/v1/cache/stats", None),
            ("GET", "/server_info", None),
            ("GET", f"/v1/cache/nodes/{key}", None),
            ("GET", f"/v1/responses/resp_{key[:32]}", None),
            ("GET", "/v1/cache/tree?limit=1000", None),
        )
    )


def _chains(rng: random.Random) -> Request:
    """A stored turn; the conduct `chain` continues it again and again."""
    item = {"role": "user", "content": rng.choice(("x", "y" * 50))}
    items = [item] * rng.choice((1, 3, size(rng, 5000) or 1))
    return "POST", "/v1/responses", {"input": items, "max_output_tokens": 1, "store": True}


def _grammars(rng: random.Random) -> Request:
    """A new one, and slow to compile."""
    name = "".join(rng.choices(string.ascii_lowercase, k=8))
    parts = "|".join(f"[a-z]{{{n},{n + 40}}}{n}" for n in range(rng.randint(1, 30)))
    fields = {f"{name}{n}": {"type": "string", "maxLength": n} for n in range(rng.randint(1, 60))}
    form: dict[str, Any] = rng.choice(
        (
            {"regex": f"{name}({parts})"},
            {"json": {"type": "object", "properties": fields, "additionalProperties": False}},
        )
    )
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "max_tokens": 2, "structured_outputs": form}
    return "POST", "/v1/chat/completions", body


def _pins(rng: random.Random) -> Request:
    """As many and as long as possible; sometimes lifted, its own or others'."""
    kind = rng.random()
    if kind < 0.1:
        return "GET", f"/v1/cache/pins?offset={size(rng, 10**9)}&limit=1000", None
    if kind < 0.2:
        own = rng.choice(("", "/" + rng.randbytes(32).hex(), "/%00", "/" + "f" * 5000))
        return "DELETE", "/v1/cache/pins" + own, None
    text = f"{rng.randrange(40)} " + "pin this " * size(rng, 300)
    if kind < 0.5:
        return "POST", "/v1/completions", {"prompt": text, "max_tokens": 1}
    return "POST", "/v1/cache/pin", {"prompt": text, "ttl_seconds": LONGEST_TTL}


def _readers(rng: random.Random) -> Request:
    return "GET", "/v1/cache/events", None


def _model(rng: random.Random) -> Request:
    """Nothing odd: one who uses the model itself, as much as it gets."""
    text = f"{rng.randrange(10**6)} " + "tell me about it " * size(rng, 100)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 64, "ignore_eos": True}
    return "POST", "/v1/chat/completions", body


GROUPS: Mapping[str, Callable[[random.Random], Request]] = {
    "tenants": _tenants,
    "chains": _chains,
    "grammars": _grammars,
    "pins": _pins,
    "readers": _readers,
    "model": _model,
}
HOSTILE_GROUPS = ("tenants", "chains", "grammars", "pins", "readers")
"""Those of ordinary runs."""
CONDUCTS: Mapping[str, Literal["chain", "watch"]] = {"chains": "chain", "readers": "watch"}
"""Of groups with one of their own; the others ask and read the answer."""
