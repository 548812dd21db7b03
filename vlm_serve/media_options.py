"""Options about media in prompts; fields of `EngineConfig`."""

from __future__ import annotations

import re

from vlm_serve.options import option

_GROUP = "media"
_LIMIT = re.compile(r"(image|video)\s*=\s*(\d{1,6})", re.ASCII)

LOCAL_PATH = option(
    None,
    "folder below which file:// URLs may name media",
    group=_GROUP,
    kind="text",
    metavar="DIR",
)
DOMAINS = option(
    (),
    "hosts from which media may be fetched (comma-separated)",
    group=_GROUP,
    kind="list",
    default_text="every public host",
)
PRIVATE_NETWORKS = option(
    False,
    "also fetch media from addresses that are not public",
    group=_GROUP,
    kind="bool",
)
LIMITS = option(
    "",
    "most images and videos in one prompt, such as image=4,video=1",
    group=_GROUP,
    kind="text",
    metavar="LIMITS",
    default_text="none",
)
IMAGE_PIXELS = option(
    1 << 26,
    "most pixels of an image, read from its header before it is decoded",
    group=_GROUP,
    kind="int",
    low=1,
    high=178_956_970,
)
FETCH_TIMEOUT = option(
    30.0,
    "seconds for fetching one medium, redirects included",
    group=_GROUP,
    kind="float",
    low=0.001,
    high=3600,
    metavar="SECONDS",
)


def read_limits(text: str) -> dict[str, int] | None:
    """Most media of a prompt by modality, from a value of `LIMITS`; None if it cannot be read."""
    limits: dict[str, int] = {}
    text = text.strip()
    if text.startswith("{"):  # the JSON form that other servers take
        text = text.strip("{}").replace('"', "").replace(":", "=")
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _LIMIT.fullmatch(part)
        if found is None or found[1] in limits:
            return None
        limits[found[1]] = int(found[2])
    return limits
