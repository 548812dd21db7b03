"""Parse the option `limit_mm_per_prompt`."""

from __future__ import annotations

import re

_LIMIT = re.compile(r"(image|video)\s*=\s*(\d{1,6})", re.ASCII)


def read_media_limits(text: str) -> dict[str, int] | None:
    """Return the most media of a prompt by modality; None if the text is malformed.

    Args:
        text: such as `image=4,video=1`, or the JSON object that vLLM takes.
    """
    limits: dict[str, int] = {}
    text = text.strip()
    if text.startswith("{"):
        text = text.strip("{}").replace('"', "").replace(":", "=")
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _LIMIT.fullmatch(part)
        if found is None or found[1] in limits:
            return None
        limits[found[1]] = int(found[2])
    return limits
