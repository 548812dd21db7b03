"""Reads the items of OpenAI's Responses form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.cache_wishes import without_marks
from vlm_serve.preprocess.reading.chat import read_role, read_tool_call
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.parts import read_content, read_part
from vlm_serve.preprocess.reading.turns import join_leading, order_results
from vlm_serve.preprocess.reading.values import (
    list_of,
    object_of,
    plain_data,
    text_of,
    unsupported,
)
from vlm_serve.preprocess.reading.vendor_tools import read_item_tools

# Records of what OpenAI's servers did. A client merely sends back what it got from them.
_RESULTS = ("function_call_output", "custom_tool_call_output")
_DROPPED = frozenset(
    {
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "context_compaction",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "web_search_call",
    }
)
_ABOUT = frozenset(
    ["type", "id", "call_id", "status", "name", "output", "error", "execution", "server_label"]
)
"""Fields of a call that are no arguments."""


def read_response(body: Mapping[str, Any], conversation: Conversation) -> None:
    """Read a Responses body's instructions, items and tools.

    Raises InvalidRequestError, naming the item and field at fault.
    """
    conversation.previous = body.get("previous_response_id")
    conversation.tools = read_item_tools(body.get("tools"), conversation)
    if body.get("instructions"):
        conversation.add_system(text_of(body, "instructions", "body"), "instructions")
    conversation.past_at = len(conversation.messages)
    given = body.get("input")
    if isinstance(given, str):
        conversation.messages.append({"role": "user", "content": given})
        return
    items = list_of(given, "input", "text or a list of items")
    _read_items(items, "input", conversation, _answered(items))
    if not conversation.messages and not conversation.previous:
        raise InvalidRequestError("input must not be empty", param="input")


def read_past(items: Sequence[Mapping[str, Any]], conversation: Conversation) -> None:
    """Read the items of stored turns and put them where the conversation continues them."""
    if not conversation.previous:
        return
    items = without_marks(items, "previous_response_id")
    for continued in (conversation, conversation.cache.marked):
        if continued is not None:
            past = Conversation(uploads=conversation.uploads)
            answers = {message.get("tool_call_id") for message in continued.messages}
            _read_items(items, "previous_response_id", past, _answered(items) | answers)
            continued.put_past(past)
            join_leading(continued)
            order_results(continued)


def is_reference(item: Any) -> bool:
    """Return True for an item that only names an item of a stored response."""
    if not isinstance(item, Mapping) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def _answered(items: Sequence[Any]) -> set[Any]:
    """Return the ids of the calls with an output."""
    outputs = [item for item in items if isinstance(item, dict) and "output" in item]
    return {item["call_id"] for item in outputs if isinstance(item.get("call_id"), str)}


class _Answer:
    """Gathers the items of one answer (reasoning, text, calls) into one message."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.texts: list[str] | None = None
        self.reasoning: str | None = None
        self.calls: list[dict[str, Any]] = []

    def add_call(self, item: Mapping[str, Any], function: Mapping[str, Any], where: str) -> None:
        call = {"id": text_of(item, "call_id", where), "type": "function"}
        self.calls.append(call | {"function": read_tool_call(dict(function), where)})

    def end(self) -> None:
        if self.texts is not None or self.reasoning is not None or self.calls:
            self.conversation.add_answer(self.texts or (), self.reasoning, self.calls)
        self.texts, self.reasoning, self.calls = None, None, []


def _read_items(
    items: Sequence[Any], name: str, conversation: Conversation, answered: set[Any]
) -> None:
    answer = _Answer(conversation)
    for index, item in enumerate(items):
        where = f"{name}[{index}]"
        _read_item(answer, object_of(item, where), where, answered)
    answer.end()


def _read_item(answer: _Answer, item: Mapping[str, Any], where: str, answered: set[Any]) -> None:
    kind = item.get("type", "message")
    answer.conversation.in_result = kind in _RESULTS
    if is_reference(item):
        answer.conversation.references.append(where)
    elif isinstance(kind, str) and kind in _DROPPED:
        answer.conversation.ignored.append(where)
    elif kind == "custom_tool_call":
        # The token limit has cut a call that is incomplete.
        if item.get("status") == "incomplete" and item.get("call_id") not in answered:
            return
        arguments = {"input": text_of(item, "input", where)}
        answer.add_call(item, {"name": text_of(item, "name", where), "arguments": arguments}, where)
    elif kind == "function_call":
        function = {name: text_of(item, name, where) for name in ("name", "arguments")}
        if item.get("status") == "incomplete" and not _is_complete(function["arguments"]):
            # The token limit has cut the call. No client can have run it, unless it has an output.
            if item.get("call_id") not in answered:
                return
            function["arguments"] = "{}"
        answer.add_call(item, function, where)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        answer.reasoning = "".join(_texts(parts, f"{where}.content"))
    elif answer.conversation.in_result:
        answer.end()
        content = _content(item, "output", where, answer.conversation)
        call_id = text_of(item, "call_id", where)
        answer.conversation.add_result(call_id, content, f"{where}.call_id")
    elif isinstance(kind, str) and kind.endswith("_call"):
        _read_run(answer, item, where, answered)
    elif isinstance(kind, str) and kind.endswith("_output"):
        _read_outcome(answer, item, where)
    elif kind != "message":
        raise unsupported(f"{where}.type", kind)
    elif item.get("role") == "assistant":
        if answer.texts is not None:
            answer.end()
        answer.texts = _texts(_present(item, "content", where), f"{where}.content")
    else:
        answer.end()
        role = read_role(item.get("role"), where)
        content = _content(item, "content", where, answer.conversation)
        if role == "system":
            answer.conversation.add_system(content, f"{where}.role")
        else:
            answer.conversation.messages.append({"role": role, "content": content})


def _read_run(answer: _Answer, item: Mapping[str, Any], where: str, answered: set[Any]) -> None:
    """Read a call of a tool with a kind of its own, such as `shell_call`; some tell the outcome."""
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        answer.conversation.ignored.append(where)
        return
    if item.get("status") == "incomplete" and call_id not in answered:
        return
    given = {name: item[name] for name in item if name not in _ABOUT and item[name] is not None}
    wholes = (given.get(name) for name in ("action", "operation", "arguments"))
    arguments = next((whole for whole in wholes if isinstance(whole, str | Mapping)), given)
    name = item.get("name") or str(item["type"]).removesuffix("_call")
    answer.add_call({"call_id": call_id}, {"name": name, "arguments": arguments}, where)
    if item.get("output") is not None or item.get("error") is not None:
        _read_outcome(answer, item, where)


def _read_outcome(answer: _Answer, item: Mapping[str, Any], where: str) -> None:
    """Read the outcome of such a call: a text, a picture of a screen, or fields as JSON."""
    answer.end()
    told = (item.get(name) for name in ("output", "error", "tools", "status"))
    content: Any = next((value for value in told if value is not None), "")
    if isinstance(content, Mapping) and content.get("type") == "computer_screenshot":
        picture = {**content, "type": "input_image"}
        content = [read_part(picture, f"{where}.output", answer.conversation)]
    elif not isinstance(content, str):
        content = json.dumps(plain_data(content, where), ensure_ascii=False)
    named = "call_id" if item.get("call_id") else "id"
    answer.conversation.add_result(text_of(item, named, where), content, f"{where}.{named}")


def _present(item: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a field's value; null becomes empty text. Raises if the field is missing.

    Clients send null as the content of an answer with only calls.
    """
    if name not in item:
        raise InvalidRequestError(
            f"{where}.{name} must be text or a list of parts", param=f"{where}.{name}"
        )
    return "" if item[name] is None else item[name]


def _content(item: Mapping[str, Any], name: str, where: str, conversation: Conversation) -> Any:
    return read_content(_present(item, name, where), f"{where}.{name}", conversation)


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of content with only text parts, whatever their types are called."""
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(list_of(content, where, "text or a list of parts")):
        place = f"{where}[{index}]"
        name = "refusal" if object_of(part, place).get("type") == "refusal" else "text"
        texts.append(text_of(part, name, place))
    return texts


def _is_complete(arguments: str) -> bool:
    try:
        read_tool_call({"name": "", "arguments": arguments}, "")
    except InvalidRequestError:
        return False
    return True
