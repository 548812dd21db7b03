"""Documents in conversations: each page becomes a picture, behind its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from blake3 import blake3

from vlm_serve.errors import MediaError, UnsupportedFieldError
from vlm_serve.preprocess.media.fetch import naming
from vlm_serve.preprocess.media.images import MAX_PAGES, PdfPage, renderer
from vlm_serve.preprocess.reading.conversation import Conversation, MediaPart, text_part
from vlm_serve.preprocess.reading.data_url import read_data_url
from vlm_serve.preprocess.sized_index import SizedIndex

_KNOWN = 1024
_COUNT_BYTES = 16

CountPages = Callable[[bytes], int]
"""Returns the number of pages of a document."""


class Documents:
    """Replaces documents in conversations by their pages. Thread-safe.

    Args:
        count: counts pages. Counts of earlier documents are kept.
        max_bytes: size of a document.
    """

    def __init__(self, count: CountPages, max_bytes: int) -> None:
        self._count, self._max_bytes = count, max_bytes
        self._known = SizedIndex[int](_KNOWN, lambda number: 1)

    def expanded(self, conversation: Conversation) -> Conversation:
        """Return the conversation with each page as a picture.

        Raises:
            UnsupportedFieldError: no package for documents is installed.
            MediaError: a document is too large, damaged, encrypted, or has too many pages.
        """
        left, media = iter(conversation.media), list[MediaPart]()
        messages = [
            message | {"content": list(self._parts(message["content"], left, media))}
            if isinstance(message["content"], list)
            else message
            for message in conversation.messages
        ]
        return replace(conversation, messages=messages, media=media)

    def _parts(
        self, content: list[Any], left: Iterator[MediaPart], media: list[MediaPart]
    ) -> Iterator[Any]:
        for part in content:
            if isinstance(part, str) or part.get("text") is not None:
                yield part
                continue
            medium = next(left)
            if not medium.document:
                media.append(medium)
                yield part
                continue
            for page in self._pages(medium):
                media.append(page)
                assert isinstance(page.source, PdfPage)
                yield text_part(f"\nPage {page.source.index + 1}:\n")
                yield part

    def _pages(self, medium: MediaPart) -> Iterator[MediaPart]:
        param = medium.param
        if renderer() is None:
            raise UnsupportedFieldError(
                f"{param}: install vlm-serve[media] to read PDF documents",
                param=param,
                code="unsupported_field",
            )
        with naming(param):
            data = read_data_url("".join(medium.texts), self._max_bytes)
            number = self._number(data)
            if number > MAX_PAGES:
                raise MediaError(f"a document may have at most {MAX_PAGES} pages, not {number}")
        for index in range(number):
            source = PdfPage(data, index)
            yield replace(medium, source=source, head="", document=False, url_only=False)

    def _number(self, data: bytes) -> int:
        key = blake3(data).digest(_COUNT_BYTES)
        number = self._known.get(key)
        if number is None:
            number = self._count(data)
            self._known.put(key, number)
        return number
