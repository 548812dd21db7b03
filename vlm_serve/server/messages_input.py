"""The body of POST /v1/messages (Anthropic's form), and the chat request that asks for the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

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

MESSAGES_REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({},),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
}
MESSAGES_UNIMPLEMENTED = UNIMPLEMENTED | CHAT_ONLY | MESSAGES_REFUSED

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessageParam(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class MessagesTool(RequestModel):
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesRequest(ChatForm):
    messages: list[MessageParam] = Field(max_length=4096)
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[MessagesTool] | None = Field(None, max_length=256)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def as_chat(self) -> ChatCompletionRequest:
        """The same request in the form of /v1/chat/completions.

        Raises InvalidRequestError that names the block or field which has no such form.
        """
        chat = self.same_fields()
        chat["messages"] = self._messages()
        if self.messages and self.messages[-1].role == "assistant":
            chat["continue_final_message"] = True
        if self.stop_sequences:
            chat["stop"] = self.stop_sequences
        if self.tools:
            chat["tools"] = [_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            chat |= _tool_choice(self.tool_choice)
        if self.thinking is not None:
            on = self.thinking.get("type") != "disabled"
            chat["reasoning_effort"] = "medium" if on else "none"
        return validate(chat, ChatCompletionRequest)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _content(self.system, "system")})
        for index, message in enumerate(self.messages):
            where = f"messages[{index}].content"
            if isinstance(message.content, str) or message.role == "system":
                content = _content(message.content, where)
                messages.append({"role": message.role, "content": content})
            elif message.role == "assistant":
                messages.append(_assistant(message.content, where))
            else:
                messages += _user(message.content, where)
        return messages


def _user(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """A user's turn: each result of a tool is a message of its own, in order."""
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.get("type") == "tool_result":
            content = _content(block.get("content") or "", f"{place}.content")
            result = {"tool_call_id": text_of(block, "tool_use_id", place), "content": content}
            messages.append({"role": "tool", **result})
        else:
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(_part(block, place))
    return messages or [{"role": "user", "content": ""}]


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls = []
    for index, block in enumerate(blocks):
        place, kind = f"{where}[{index}]", block.get("type")
        if kind in texts:
            texts[kind].append(text_of(block, kind, place))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": text_of(block, "name", place), "arguments": arguments}
            identity = text_of(block, "id", place)
            calls.append({"id": identity, "type": "function", "function": function})
        else:
            raise unsupported(f"{place}.type", kind)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts["text"]) or None}
    if texts["thinking"]:
        message["reasoning"] = "".join(texts["thinking"])
    if calls:
        message["tool_calls"] = calls
    return message


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    return content_of(content, where, _part, "blocks")


def _part(block: Any, where: str) -> dict[str, Any]:
    kind = object_of(block, where).get("type")
    if kind == "text":
        return {"type": "text", "text": text_of(block, "text", where)}
    if kind != "image":
        raise unsupported(f"{where}.type", kind)
    place = f"{where}.source"
    source = object_of(block.get("source"), place)
    if source.get("type") == "base64":
        kind, data = text_of(source, "media_type", place), text_of(source, "data", place)
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    if source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": text_of(source, "url", place)}}
    raise unsupported(f"{place}.type", source.get("type"))


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    found: dict[str, Any] = {}
    if kind == "tool":
        name = text_of(choice, "name", "tool_choice")
        found["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _TOOL_CHOICES:
        found["tool_choice"] = _TOOL_CHOICES[kind]
    else:
        raise unsupported("tool_choice.type", kind)
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found
