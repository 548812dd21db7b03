"""Documents in conversations: each page becomes a picture, behind its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from blake3 import blake3

from vlm_serve.errors import InvalidRequestError, MediaError
from vlm_serve.preprocess.media.fetch import naming
from vlm_serve.preprocess.media.images import MAX_PAGES, PdfPage, file_kind, renderer
from vlm_serve.preprocess.reading.conversation import Conversation, MediaPart, text_part
from vlm_serve.preprocess.sized_index import SizedIndex

_KNOWN = 1024
_COUNT_BYTES = 16

CountPages = Callable[[bytes], int]
"""Returns the number of pages of a document."""


class Documents:
    """Replaces documents in conversations by their pages. Thread-safe.

    Args:
        count: counts pages. Counts of earlier documents are kept.
        check: raises InvalidRequestError if a prompt may not have these media.
    """

    def __init__(self, count: CountPages, check: Callable[[list[MediaPart]], None]) -> None:
        self._count, self._check = count, check
        self._known = SizedIndex[int](_KNOWN, lambda number: 1)

    def expanded(
        self, conversation: Conversation, read: Callable[[MediaPart], bytes]
    ) -> Conversation:
        """Return the conversation with each page as a picture.

        In the result of a tool, a text takes the place of a document that cannot be read, and the
        conversation's `ignored` names it.

        Args:
            read: returns a document's bytes. Raises InvalidRequestError.

        Raises:
            MediaError: a document is too large, damaged, encrypted, or has too many pages; or no
                package for documents is installed.
            MediaFetchError: its URL cannot be fetched.
        """
        left, media = iter(conversation.media), list[MediaPart]()

        def parts(message: Mapping[str, Any]) -> Iterator[Any]:
            for part in message["content"]:
                if isinstance(part, str) or part.get("text") is not None:
                    yield part
                    continue
                medium = next(left)
                if not medium.document:
                    media.append(medium)
                    yield part
                    continue
                try:
                    self._check([medium])
                    inside = self._inside(medium, read(medium))
                    pages = inside if isinstance(inside, list) else []
                    self._check([*media, *pages])
                except InvalidRequestError as error:
                    if message["role"] != "tool":
                        raise
                    yield conversation.unread(error, medium.param)
                    continue
                if isinstance(inside, str):
                    yield text_part(inside)
                for number, page in enumerate(pages, start=1):
                    media.append(page)
                    yield text_part(f"\nPage {number}:\n")
                    yield part

        messages = [
            message | {"content": list(parts(message))}
            if isinstance(message["content"], list)
            else message
            for message in conversation.messages
        ]
        return replace(conversation, messages=messages, media=media)

    def _inside(self, medium: MediaPart, data: bytes) -> list[MediaPart] | str:
        """Return the pages of a document; of another file from a URL the text."""
        fetched = medium.texts[0][:5].lower() != "data:"
        with naming(medium.param):
            if fetched and b"%PDF-" not in data[:1024]:  # where readers look for it
                return _text_of(data)
            if renderer() is None:
                raise MediaError("install pypdfium2 to read PDF documents")
            number = self._number(data)
            if number > MAX_PAGES:
                raise MediaError(f"a document may have at most {MAX_PAGES} pages, not {number}")
        page = replace(medium, head="", document=False, url_only=False)
        return [replace(page, source=PdfPage(data, index)) for index in range(number)]

    def _number(self, data: bytes) -> int:
        key = blake3(data).digest(_COUNT_BYTES)
        number = self._known.get(key) or self._count(data)
        self._known.put(key, number)
        return number


def _text_of(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        kind = file_kind(data) or "of an unknown kind"
        raise MediaError(f"the document is neither PDF nor text in UTF-8: it is {kind}") from None
