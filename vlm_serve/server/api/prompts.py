"""Prompts given as messages, text or token ids, for several routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.keys import KeyScope
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.server.api.chat.request import ChatMessage, TemplateFields
from vlm_serve.server.api.fields import MAX_MESSAGES, Items

if TYPE_CHECKING:
    from vlm_serve.server.service import Service


class PromptOrMessages(TemplateFields):
    """A request with either `messages` or `prompt`. Subclasses declare `prompt`."""

    model: str | None = None
    messages: Items[ChatMessage] | None = Field(None, max_length=MAX_MESSAGES)

    def check_alternatives(self, prompt: object) -> None:
        """Raise InvalidRequestError if both messages and a prompt were given."""
        if prompt is not None and self.messages is not None:
            raise InvalidRequestError("give either prompt or messages", param="prompt")


def prepare_tokens(
    service: Service, prompt: str | list[int], own: KeyScope, count: int | None = None
) -> Prompt:
    """Return the prompt for text or token ids; call it on a preparation thread.

    Args:
        own: whose prompt it is.
        count: only so many tokens at the end are used; None: all are.

    Raises:
        InvalidRequestError: an id is outside the vocabulary.
    """
    preprocessor = service.engine.preprocessor
    if not isinstance(prompt, str):
        ids = prompt if count is None else prompt[-count:]
    elif count is None:
        ids = preprocessor.tokenizer.encode(prompt)
    else:
        ids = preprocessor.tokenizer.encode_end(prompt, count)
    made: Prompt = preprocessor.prepare_tokens(ids, **own.options)
    return made
