"""The body of POST /v1/responses, and the chat request that asks for the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import Field

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.body import validate
from vlm_serve.server.chat_form import (
    CHAT_ONLY,
    ChatForm,
    content_of,
    object_of,
    text_of,
    unsupported,
)
from vlm_serve.server.fields import UNIMPLEMENTED
from vlm_serve.server.protocol import ChatCompletionRequest, RequestModel

# Nothing is stored between requests: earlier turns come as items of `input`.
RESPONSES_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
RESPONSES_UNIMPLEMENTED = UNIMPLEMENTED | CHAT_ONLY | RESPONSES_REFUSED

# Names of chat fields in errors -> what the client has sent instead.
_OWN_NAMES = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


@contextmanager
def own_names() -> Iterator[None]:
    """Errors about a chat field name the field of /v1/responses that it was made from."""
    try:
        yield
    except InvalidRequestError as error:
        name = error.param or ""
        if name in _OWN_NAMES:
            error.param = _OWN_NAMES[name]
            error.message = error.message.replace(name, error.param)
        raise


class ResponsesTool(RequestModel):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(ChatForm):
    input: str | list[dict[str, Any]] = Field(max_length=1 << 26)
    instructions: str | None = None
    max_output_tokens: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    tools: list[ResponsesTool] | None = Field(None, max_length=256)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)

    def as_chat(self) -> ChatCompletionRequest:
        """The same request in the form of /v1/chat/completions.

        Raises InvalidRequestError that names the item or field which has no such form.
        """
        chat = self.same_fields()
        chat["messages"] = self._messages()
        if self.max_output_tokens is not None:
            chat["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            chat["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})}
                for tool in self.tools
            ]
        if self.tool_choice is not None:
            chat["tool_choice"] = _tool_choice(self.tool_choice)
        effort = (self.reasoning or {}).get("effort")
        if effort is not None:
            chat["reasoning_effort"] = effort
        chat |= _text_options(self.text or {})
        return validate(chat, ChatCompletionRequest)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        turn = _AssistantTurn(messages)
        for index, item in enumerate(self.input):
            _add_item(turn, item, f"input[{index}]")
        turn.end()
        return messages


class _AssistantTurn:
    """Gathers the items of one answer (reasoning, text, calls), which are one chat message."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self._open: dict[str, Any] | None = None

    @property
    def message(self) -> dict[str, Any]:
        if self._open is None:
            self._open = {"role": "assistant", "content": None}
            self.messages.append(self._open)
        return self._open

    def end(self) -> None:
        self._open = None


def _add_item(turn: _AssistantTurn, item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {name: text_of(item, name, where) for name in ("name", "arguments")}
        call = {"id": text_of(item, "call_id", where), "type": "function", "function": function}
        turn.message.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        turn.message["reasoning"] = _joined(parts, f"{where}.content")
    elif kind == "function_call_output":
        turn.end()
        content = _content(item.get("output"), f"{where}.output")
        turn.messages.append(
            {"role": "tool", "tool_call_id": text_of(item, "call_id", where), "content": content}
        )
    elif kind != "message":
        raise unsupported(f"{where}.type", kind)
    elif item.get("role") == "assistant":
        if turn.message["content"] is not None:
            turn.end()
        turn.message["content"] = _joined(item.get("content"), f"{where}.content")
    else:
        turn.end()
        content = _content(item.get("content"), f"{where}.content")
        turn.messages.append({"role": text_of(item, "role", where), "content": content})


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    return content_of(content, where, _part, "parts")


def _joined(content: Any, where: str) -> str:
    """The text of parts that may be nothing else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be text or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise InvalidRequestError(f"{where}[{index}] must be an object", param=where)
        name = "refusal" if part.get("type") == "refusal" else "text"
        texts.append(text_of(part, name, f"{where}[{index}]"))
    return "".join(texts)


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = object_of(part, where).get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": text_of(part, "text", where)}
    if kind in ("image_url", "video_url"):
        return dict(part)
    if kind != "input_image":
        raise unsupported(f"{where}.type", kind)
    if part.get("file_id") is not None:
        raise unsupported(f"{where}.file_id", part["file_id"])
    image: dict[str, Any] = {"url": text_of(part, "image_url", where)}
    if part.get("detail") is not None:
        image["detail"] = part["detail"]
    return {"type": "image_url", "image_url": image}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise unsupported("tool_choice.type", choice.get("type"))
    return {"type": "function", "function": {"name": text_of(choice, "name", "tool_choice")}}


def _text_options(text: Mapping[str, Any]) -> dict[str, Any]:
    """`text.format` and `text.verbosity` under the names that chat has for them."""
    options: dict[str, Any] = {}
    form = text.get("format")
    if form is not None and not isinstance(form, dict):
        raise InvalidRequestError("text.format must be an object", param="text")
    if form and form.get("type") == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type"}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form and form.get("type") != "text":
        options["response_format"] = form
    if text.get("verbosity") is not None:
        options["verbosity"] = text["verbosity"]
    return options
