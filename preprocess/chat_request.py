"""Renders a conversation with a checkpoint's chat template."""

from __future__ import annotations

import json
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.template import ChatTemplate
from vlm_serve.preprocess.typed_text import TypedText


class ChatRequest:
    """Messages, tools and template variables of a request.

    Raises InvalidRequestError if the template does not accept these messages, or if the last one
    has nothing to continue.

    Attributes:
        messages: the conversation's, fitted to the template.
        tools: function definitions; None if there are none.
        kwargs: further variables of the template.
    """

    def __init__(self, conversation: Conversation, template: ChatTemplate) -> None:
        self._continues = conversation.continue_final_message
        if self._continues and conversation.messages[-1]["content"] is None:
            raise _nothing_to_continue()
        self._template = template
        self.messages = template.traits.fit(conversation)
        self.tools = conversation.tools or None
        self.kwargs = conversation.template_kwargs
        self._add_generation_prompt = conversation.add_generation_prompt

    def tools_text(self) -> str:
        """Return the tools as JSON, about as long as their rendering."""
        return json.dumps(self.tools, ensure_ascii=False) if self.tools else ""

    def render(self, typed: TypedText) -> str:
        """Render the prompt's text, with user text hidden by `typed`."""
        if not self._continues:
            return self._render(typed, typed.hide(self.messages), self._add_generation_prompt)
        messages = typed.hide(self.messages)
        # A lost blank reveals a template that trims the end of a message; then trim here too.
        mark = typed.mark + " "
        _append_to_last(messages[-1], mark)
        text = self._render(typed, messages, False)
        at = text.rfind(typed.mark)
        if at < 0:
            raise InvalidRequestError(
                "the chat template does not render the message to continue",
                param="continue_final_message",
            )
        return text[:at] if text[at : at + 2] == mark else text[:at].rstrip()

    def render_next_turn(self, typed: TypedText) -> str:
        """Render a possible next prompt: the conversation with an answer and one more user turn."""
        answered = self.messages[-1]["role"] == "assistant"
        roles = ("user",) if answered else ("assistant", "user")
        turns = [self._template.traits.fit_turn(role, "a") for role in roles]
        return self._render(typed, typed.hide(self.messages) + turns, True)

    def _render(
        self,
        typed: TypedText,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
    ) -> str:
        text = self._template.render(
            messages,
            tools=typed.hide(self.tools),
            add_generation_prompt=add_generation_prompt,
            kwargs=typed.hide(self.kwargs),
        )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the messages contain a lone surrogate", param="messages"
            ) from None
        return text


def _append_to_last(message: dict[str, Any], mark: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + mark
        return
    texts = [part for part in content if part["type"] == "text"]
    if not texts:
        raise _nothing_to_continue()
    texts[-1]["text"] += mark


def _nothing_to_continue() -> InvalidRequestError:
    return InvalidRequestError(
        "the last message has no text to continue", param="continue_final_message"
    )
