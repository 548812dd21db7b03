"""Reads messages in OpenAI's chat form, and definitions and calls of tools in all forms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import REASONING_KEYS, Conversation
from vlm_serve.preprocess.reading.parts import read_content
from vlm_serve.preprocess.reading.values import (
    begins_json,
    list_of,
    object_of,
    plain_data,
    short_repr,
    without_halves,
)

# "developer" is OpenAI's newer name for the system role; templates know only the old one.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def read_chat(body: Mapping[str, Any], conversation: Conversation) -> None:
    """Read a chat body's messages and flags.

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
    history = _History(messages)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        read = _message(object_of(message, where), where, conversation, history)
        conversation.messages.append(read)
        if read["role"] == "system":
            conversation.system_places.append(f"{where}.role")
        elif read["role"] == "tool":
            conversation.result_places.append(f"{where}.tool_call_id")


def read_role(role: Any, where: str) -> str:
    """Return a message's role as templates name it. Raises InvalidRequestError."""
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}, not {short_repr(role)}",
            param=f"{where}.role",
        )
    return _ROLES[role]


class _History:
    """Pairs calls with their results, also in the older form with one function call a message."""

    def __init__(self, messages: Sequence[Any]) -> None:
        known = [message for message in messages if isinstance(message, Mapping)]
        self._answered = {str(message.get("tool_call_id")) for message in known}
        # A result in the older form has no id; here results come in their order.
        self._results = sum(message.get("role") == "function" for message in known)
        self._calls = 0

    def answered(self, call: Any) -> bool:
        return isinstance(call, Mapping) and str(call.get("id")) in self._answered

    def converted(self, message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Return a message of the older form in the newer one."""
        if message.get("role") == "function":
            return {**message, "role": "tool"}
        given = message.get("function_call")
        if given is None:
            return message
        self._calls += 1
        call: dict[str, Any] = {"id": f"call_{self._calls}", "type": "function"}
        call["function"] = object_of(given, f"{where}.function_call")
        if self._calls <= self._results:
            self._answered.add(call["id"])
        rest = {key: value for key, value in message.items() if key != "function_call"}
        return {**rest, "tool_calls": [*(message.get("tool_calls") or ()), call]}


def _message(
    message: Mapping[str, Any], where: str, conversation: Conversation, history: _History
) -> dict[str, Any]:
    message = history.converted(message, where)
    role = read_role(message.get("role"), where)
    conversation.in_result = role == "tool"
    content = read_content(message.get("content"), f"{where}.content", conversation)
    refusal = message.get("refusal")
    if content is None and role == "assistant" and isinstance(refusal, str):
        content = refusal
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
        calls = []
        for at, call in enumerate(list_of(read["tool_calls"], place)):
            try:
                calls.append(read_tool_call(_as_function(call), f"{place}[{at}]"))
            except InvalidRequestError:
                if not is_cut(call):
                    raise
                # The token limit has cut the call, so only a client that answers it has run it.
                if history.answered(call):
                    whole = call | {"function": call["function"] | {"arguments": "{}"}}
                    calls.append(read_tool_call(whole, f"{place}[{at}]"))
        read["tool_calls"] = calls
    reasoning = next((read[key] for key in REASONING_KEYS if key in read), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise InvalidRequestError(f"{where}.reasoning_content must be text", param=where)
        read |= {"thinking": read.get("thinking", reasoning), "reasoning_content": reasoning}
    return read


def _as_function(call: Any) -> Any:
    """Return a call of a tool that takes one text as that of a function."""
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping) or call.get("type") != "custom":
        return call
    function = {"name": custom.get("name"), "arguments": {"input": custom.get("input") or ""}}
    return {"id": call.get("id"), "type": "function", "function": function}


MAX_ARGUMENTS_CHARACTERS = 1 << 20
"""Limit on the JSON text of one tool call's arguments."""

# Templates print definitions as written: one order of fields gives equal tools equal prompts.
_ORDER = ("type", "name", "description", "parameters")


def read_tool(tool: Any, where: str) -> dict[str, Any]:
    """Read a tool's definition in the form of any API, as templates see it.

    It is a function, or an object with one in `function`. Fields without a value are dropped.

    Raises InvalidRequestError, naming the tool.
    """
    plain = _without_nulls(plain_data(tool, where))
    nested = isinstance(plain, dict) and "function" in plain
    function = plain["function"] if nested else plain
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must describe a function by name", param=where)
    function = _without_nulls(function)
    for schema in ("parameters", "input_schema"):
        if schema in function:
            function[schema] = _without_nulls(function[schema])
    function = {name: function[name] for name in _ORDER if name in function} | function
    return {"type": "function", **plain, "function": function} if nested else function


def _without_nulls(value: Any) -> Any:
    """Drop an object's fields without a value, such as `properties: null` of a schema."""
    if not isinstance(value, dict):
        return value
    return {name: inside for name, inside in value.items() if inside is not None}


def is_cut(call: Any) -> bool:
    """Return True if a call's arguments are JSON text of an object that ends too early."""
    function = call.get("function") if isinstance(call, Mapping) else None
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(text, str) or len(text) > MAX_ARGUMENTS_CHARACTERS:
        return False
    if not text.lstrip().startswith("{"):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return not error.msg.startswith("Extra data") and begins_json(text)
    except (ValueError, RecursionError):
        return False
    return False


def read_tool_call(call: Any, where: str) -> dict[str, Any]:
    """Convert a tool call for templates: parse OpenAI's JSON text of arguments into an object.

    Args:
        call: a function's name and arguments, or an object with them in `function`.
        where: its place in the request, for errors.

    Raises InvalidRequestError.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must name a function", param=where)
    place = f"{where}.function.arguments" if "function" in call else f"{where}.arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        if len(arguments) > MAX_ARGUMENTS_CHARACTERS:  # parsing it would block all requests
            raise InvalidRequestError(
                f"{place} must have at most {MAX_ARGUMENTS_CHARACTERS} characters", param=place
            )
        try:
            arguments = json.loads(without_halves(arguments)) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(f"{place} must be a JSON object", param=place)
    function = function | {"arguments": plain_data(arguments, place)}
    return call | {"function": function} if "function" in call else function
