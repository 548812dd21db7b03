"""Options of the store that several servers share; fields of `EngineConfig`."""

from __future__ import annotations

from vlm_serve.options import option

_CACHE = "cache"

URL = option(
    None,
    "store that servers of one model share, below all other tiers: redis://HOST:PORT/DB, or "
    "rediss:// with TLS; valkey:// and valkeys:// are the same",
    group=_CACHE,
    kind="text",
    metavar="URL",
)
KEY_FILE = option(
    None,
    "file with at least 32 secret bytes, the same for all these servers: without them nobody "
    "can write what they believe; needed unless the store is on this machine",
    group=_CACHE,
    kind="text",
    metavar="FILE",
)
INSECURE = option(
    False,
    "talk to a shared store on another machine without TLS",
    group=_CACHE,
    kind="bool",
)
TIMEOUT = option(
    1.0,
    "seconds that one request may wait for the shared store, look-up and reading together",
    group=_CACHE,
    kind="float",
    low=0.001,
    high=60,
    metavar="SECONDS",
)
TTL = option(
    24 * 3600,
    "seconds after which an entry of the shared store expires, unless it is used again",
    group=_CACHE,
    kind="int",
    low=60,
    high=365 * 24 * 3600,
    metavar="SECONDS",
)
WRITE = option(
    "stable",
    "what is written to the shared store: media (up to the ends of media, of the system prompt "
    "and of what two prompts share), stable (also up to the ends of turns), all (up to every "
    "snapshot)",
    group=_CACHE,
    kind="text",
    choices=("media", "stable", "all"),
)
WRITE_BANDWIDTH = option(
    256 << 20,
    "most bytes a second that are written to the shared store",
    group=_CACHE,
    kind="size",
    low=1,
    metavar="SIZE",
)
