"""Which media a message that came over HTTP may name.

In Python a part may hold a path or bytes; a client may only send URLs. What the URL may reach is
decided where it is fetched.
"""

from __future__ import annotations

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.messages import Conversation

SCHEMES = ("data:", "http://", "https://", "file://")


def check_media_sources(conversation: Conversation) -> None:
    """Raises InvalidRequestError that names the part whose source is no URL of a known scheme."""
    for part in conversation.media:
        url = part.source
        if not isinstance(url, str) or not url[:8].lower().startswith(SCHEMES):
            raise InvalidRequestError(
                f"{part.param} must be a URL that begins with {', '.join(SCHEMES)}",
                param=part.param,
            )
