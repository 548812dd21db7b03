"""A rendered prompt whose media are not loaded yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_serve.preprocess.chat_request import ChatRequest
from vlm_serve.preprocess.expand import Expansion, PromptPiece
from vlm_serve.preprocess.keys import AdapterIdentity, Roots
from vlm_serve.preprocess.reading.conversation import MediaPart
from vlm_serve.preprocess.typed_text import TypedText


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation that has been read, checked and rendered; its media are yet to be loaded.

    Attributes:
        roots: of the prompt's keys.
        adapter: of the model's weights.
        media: the media to load, in order.
        request: the conversation.
        typed: the special tokens typed by users.
        text: the template's text, with those hidden.
        pieces: that text, split at the template's special tokens.
        cut: there are only the last of them.
    """

    roots: Roots
    cache_salt: str
    adapter: AdapterIdentity
    request: ChatRequest
    media: list[MediaPart]
    typed: TypedText
    text: str
    pieces: tuple[PromptPiece, ...]
    cut: bool = False

    def system_end(self, expansion: Expansion) -> int:
        """Return the position after a leading system message, 0 if there is none."""
        first_text = next((piece.text for piece in self.pieces if not piece.is_special), "")
        if first_text.lstrip().startswith("system") and expansion.message_ends:
            return expansion.message_ends[0]
        return 0


def texts_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts in the messages' contents; messages in the form of `Conversation`."""
    found = []
    for message in messages:
        content = message.get("content")
        for part in [content] if isinstance(content, str) else content or ():
            text = part if isinstance(part, str) else part.get("text")
            if isinstance(text, str):
                found.append(text)
    return found
