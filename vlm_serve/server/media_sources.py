"""Which media a message that came over HTTP may name.

In Python a part may hold a path or bytes; a client may only send URLs. What the URL may reach is
decided where it is fetched.
"""

from __future__ import annotations

from typing import Any

from vlm_serve.errors import InvalidRequestError

SCHEMES = ("data:", "http://", "https://", "file://")
_KEYS = ("image_url", "video_url", "input_image", "input_video", "image", "video", "url")


def check_media_sources(messages: list[dict[str, Any]]) -> None:
    """Raises InvalidRequestError that names the part whose source is no URL of a known scheme."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for number, part in enumerate(content):
            for key in _KEYS & part.keys():
                value = part[key]
                url = value.get("url") if isinstance(value, dict) else value
                if url is None or (isinstance(url, str) and url[:8].lower().startswith(SCHEMES)):
                    continue
                where = f"messages[{index}].content[{number}].{key}"
                raise InvalidRequestError(
                    f"{where} must be a URL that begins with {', '.join(SCHEMES)}", param=where
                )
