"""Media sources that a client may name.

In Python a part may hold a path or bytes; over HTTP it must hold a URL. The fetching code decides
where the URL may point.
"""

from __future__ import annotations

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation

SCHEMES = ("data:", "http://", "https://", "file://")


def check_media_sources(conversation: Conversation) -> None:
    """Check that every medium's source is a URL of a known scheme.

    Raises:
        InvalidRequestError: one is not; the error names its part.
    """
    for part in conversation.media:
        url = part.head or part.source
        if not isinstance(url, str) or not url[:8].lower().startswith(SCHEMES):
            raise InvalidRequestError(
                f"{part.param} must be a URL that begins with {', '.join(SCHEMES)}",
                param=part.param,
            )
