"""One conversation and how it is to be rendered, all as plain data."""

from __future__ import annotations

import json
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.messages import Conversation, read_tools
from vlm_serve.preprocess.template import ChatTemplate
from vlm_serve.preprocess.typed_text import TypedText, plain_data

_MAX_TEMPLATE_KWARGS = 64


class ChatRequest:
    """Messages, tools and template variables of a request.

    Raises InvalidRequestError if tools or variables are malformed or flags exclude each other.

    Attributes:
        messages, media: see `Conversation`.
        tools: function definitions, None for none.
        kwargs: further variables of the template.
    """

    def __init__(
        self,
        conversation: Conversation,
        tools: Any,
        kwargs: Any,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> None:
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        self.messages, self.media = conversation.messages, conversation.media
        self.tools = read_tools(tools)
        self.kwargs = plain_data({} if kwargs is None else kwargs, "chat_template_kwargs")
        if not isinstance(self.kwargs, dict) or len(self.kwargs) > _MAX_TEMPLATE_KWARGS:
            raise InvalidRequestError(
                f"chat_template_kwargs must be an object of at most {_MAX_TEMPLATE_KWARGS} names",
                param="chat_template_kwargs",
            )
        self._add_generation_prompt = add_generation_prompt
        self._continues = continue_final_message

    def tools_text(self) -> str:
        """About what a template says of the tools."""
        return json.dumps(self.tools, ensure_ascii=False) if self.tools else ""

    def render(self, template: ChatTemplate, typed: TypedText) -> str:
        """The prompt's text, user text hidden in `typed`'s way."""
        if not self._continues:
            return self._render(
                template, typed, typed.hide(self.messages), self._add_generation_prompt
            )
        messages = typed.hide(self.messages)
        # The blank shows whether the template trims the end of a message; then so must we.
        mark = typed.mark + " "
        _append_to_last(messages[-1], mark)
        text = self._render(template, typed, messages, False)
        at = text.rfind(typed.mark)
        if at < 0:
            raise InvalidRequestError(
                "the chat template does not show the message to continue",
                param="continue_final_message",
            )
        return text[:at] if text[at : at + 2] == mark else text[:at].rstrip()

    def render_next_turn(self, template: ChatTemplate, typed: TypedText) -> str:
        """What the text may become once there is an answer and the user asks again."""
        turns = [{"role": "user", "content": "a"}]
        if self.messages[-1]["role"] != "assistant":
            turns.insert(0, {"role": "assistant", "content": "a"})
        return self._render(template, typed, typed.hide(self.messages) + turns, True)

    def _render(
        self,
        template: ChatTemplate,
        typed: TypedText,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
    ) -> str:
        text = template.render(
            messages,
            tools=typed.hide(self.tools),
            add_generation_prompt=add_generation_prompt,
            kwargs=typed.hide(self.kwargs),
        )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the messages hold a lone surrogate", param="messages"
            ) from None
        return text


def _append_to_last(message: dict[str, Any], mark: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + mark
        return
    texts = [part for part in content or [] if part["type"] == "text"]
    if not texts:
        raise InvalidRequestError(
            "the last message has no text to continue", param="continue_final_message"
        )
    texts[-1]["text"] += mark
