"""Reads messages in OpenAI's chat form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import REASONING_KEYS, Conversation
from vlm_serve.preprocess.reading.parts import read_content
from vlm_serve.preprocess.reading.tools import read_tool_call, read_tools
from vlm_serve.preprocess.reading.values import list_of, object_of, short_repr
from vlm_serve.preprocess.typed_text import plain_data

# "developer" is OpenAI's newer name for the system role; templates know only the old one.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def read_chat(body: Mapping[str, Any], conversation: Conversation) -> None:
    """Read a chat body's messages, tools and flags.

    Raises InvalidRequestError, naming the message, part and field at fault.
    """
    messages = list_of(body.get("messages"), "messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    add, continues = body.get("add_generation_prompt"), body.get("continue_final_message")
    if continues and add:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    conversation.continue_final_message = bool(continues)
    conversation.add_generation_prompt = not continues if add is None else add
    conversation.tools = read_tools(body.get("tools"))
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        conversation.messages.append(_message(object_of(message, where), where, conversation))


def read_role(role: Any, where: str) -> str:
    """Return a message's role as templates name it. Raises InvalidRequestError."""
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}, not {short_repr(role)}",
            param=f"{where}.role",
        )
    return _ROLES[role]


def _message(message: Mapping[str, Any], where: str, conversation: Conversation) -> dict[str, Any]:
    role = read_role(message.get("role"), where)
    content = read_content(message.get("content"), f"{where}.content", conversation)
    if content is None and role != "assistant":
        if "content" not in message:
            raise InvalidRequestError(f"{where}.content is missing", param=f"{where}.content")
        content = ""
    read: dict[str, Any] = {"role": role, "content": content}
    for key, value in message.items():
        if value is not None and key not in read:
            read[key] = plain_data(value, f"{where}.{key}")
    if "tool_calls" in read:
        place = f"{where}.tool_calls"
        calls = enumerate(list_of(read["tool_calls"], place))
        read["tool_calls"] = [read_tool_call(call, f"{place}[{at}]") for at, call in calls]
    reasoning = next((read[key] for key in REASONING_KEYS if key in read), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise InvalidRequestError(f"{where}.reasoning_content must be text", param=where)
        read |= {"thinking": read.get("thinking", reasoning), "reasoning_content": reasoning}
    return read
