"""Reading the `input` field of a response request into a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.messages import Conversation, read_tool_call
from vlm_serve.server.api.field_checks import object_of, text_of, unsupported

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def read_input(
    instructions: str | None, past: list[dict[str, Any]], given: str | list[dict[str, Any]]
) -> Conversation:
    """Read a request's items into a conversation.

    Args:
        past: the items of the turns before it.

    Raises:
        InvalidRequestError: an item or field is invalid; the error names it.
    """
    conversation = Conversation()
    if instructions:
        conversation.add_turn("system", instructions, "instructions")
    items = given if isinstance(given, list) else []
    answer = _AnswerItems(
        conversation, {item.get("call_id") for item in (*past, *items) if _is_output(item)}
    )
    for index, item in enumerate(past):
        _read_item(answer, item, f"previous_response_id[{index}]")
    if isinstance(given, str):
        answer.end()
        conversation.add_turn("user", given, "input")
        return conversation
    for index, item in enumerate(given):
        _read_item(answer, item, f"input[{index}]")
    answer.end()
    if not conversation.messages:
        raise InvalidRequestError("input must not be empty", param="input")
    return conversation


class _AnswerItems:
    """Gathers the items of one answer (reasoning, text, calls) into one message.

    Args:
        answered: ids of the calls that have an output.
    """

    def __init__(self, conversation: Conversation, answered: set[Any]) -> None:
        self.conversation = conversation
        self.answered = answered
        self.texts: list[str] | None = None
        self.reasoning: str | None = None
        self.calls: list[dict[str, Any]] = []

    def end(self) -> None:
        if self.texts is not None or self.reasoning is not None or self.calls:
            self.conversation.add_answer(self.texts or (), self.reasoning, self.calls)
        self.texts, self.reasoning, self.calls = None, None, []


def _read_item(answer: _AnswerItems, item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    conversation = answer.conversation
    if kind == "function_call":
        function = {name: text_of(item, name, where) for name in ("name", "arguments")}
        if item.get("status") == "incomplete" and not _is_complete(function["arguments"]):
            # The token limit has cut the call. No client can have run it, unless it has an output.
            if item.get("call_id") not in answer.answered:
                return
            function["arguments"] = "{}"
        call = {"id": text_of(item, "call_id", where), "type": "function"}
        answer.calls.append(call | {"function": read_tool_call(function, where)})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        answer.reasoning = "".join(_texts(parts, f"{where}.content"))
    elif kind == "function_call_output":
        answer.end()
        content = _content(_field_or_empty(item, "output"), f"{where}.output", conversation)
        call_id = text_of(item, "call_id", where)
        conversation.add_turn("tool", content, where, tool_call_id=call_id)
    elif kind != "message":
        raise unsupported(f"{where}.type", kind)
    elif item.get("role") == "assistant":
        if answer.texts is not None:
            answer.end()
        answer.texts = _texts(_field_or_empty(item, "content"), f"{where}.content")
    else:
        answer.end()
        content = _content(_field_or_empty(item, "content"), f"{where}.content", conversation)
        conversation.add_turn(item.get("role"), content, where)


def _field_or_empty(item: Mapping[str, Any], name: str) -> Any:
    """Return a field's value; null becomes empty text.

    Clients send null as the content of an answer with only calls.
    """
    return "" if name in item and item[name] is None else item.get(name)


def _is_output(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "function_call_output" and isinstance(item.get("call_id"), str)


def _is_complete(arguments: str) -> bool:
    try:
        read_tool_call({"name": "", "arguments": arguments}, "")
    except InvalidRequestError:
        return False
    return True


def _content(content: Any, where: str, conversation: Conversation) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be text or a list of parts", param=where)
    return [_part(part, f"{where}[{index}]", conversation) for index, part in enumerate(content)]


def _part(part: Any, where: str, conversation: Conversation) -> dict[str, Any]:
    kind = object_of(part, where).get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": text_of(part, "text", where)}
    if kind not in ("input_image", "image_url", "video_url"):
        raise unsupported(f"{where}.type", kind)
    if part.get("file_id") is not None:
        raise unsupported(f"{where}.file_id", part["file_id"])
    return conversation.part(part, where)


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of content with only text parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be text or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise InvalidRequestError(f"{where}[{index}] must be an object", param=where)
        name = "refusal" if part.get("type") == "refusal" else "text"
        texts.append(text_of(part, name, f"{where}[{index}]"))
    return texts
