"""Reads the blocks of Anthropic's Messages form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation, MediaPart
from vlm_serve.preprocess.reading.parts import text_part
from vlm_serve.preprocess.reading.tools import read_tool_call, read_tools
from vlm_serve.preprocess.reading.values import list_of, object_of, text_of, unsupported


def read_blocks(body: Mapping[str, Any], conversation: Conversation) -> None:
    """Read a Messages body's system prompt, messages and tools.

    Raises InvalidRequestError, naming the block and field at fault.
    """
    messages = list_of(body.get("messages"), "messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    conversation.tools = [
        {"type": "function", "function": _function(tool)} for tool in read_tools(body.get("tools"))
    ]
    if body.get("system"):
        _add(conversation, "system", body["system"], "system")
    role = ""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = text_of(object_of(message, where), "role", where)
        content = message.get("content") or ""
        where += ".content"
        if isinstance(content, str) or role == "system":
            _add(conversation, role, content, where)
        elif role == "assistant":
            _read_answer(list_of(content, where), where, conversation)
        else:
            _read_user(list_of(content, where), where, conversation)
    conversation.continue_final_message = role == "assistant"
    conversation.add_generation_prompt = role != "assistant"


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {key: tool[key] for key in ("name", "description") if key in tool}
    return described | {"parameters": tool.get("input_schema") or {}}


def _add(conversation: Conversation, role: str, content: Any, where: str, **others: Any) -> None:
    read = _content(content, where, conversation)
    conversation.messages.append({"role": role, "content": read, **others})


def _read_user(blocks: Sequence[Any], where: str, conversation: Conversation) -> None:
    """Read a user's turn; each tool result becomes a separate message, in order."""
    parts: list[dict[str, Any]] | None = None
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if object_of(block, place).get("type") == "tool_result":
            parts = None
            call_id = text_of(block, "tool_use_id", place)
            result = block.get("content") or ""
            _add(conversation, "tool", result, f"{place}.content", tool_call_id=call_id)
            continue
        if parts is None:
            parts = []
            conversation.messages.append({"role": "user", "content": parts})
        parts += _parts(block, place, conversation)


def _read_answer(blocks: Sequence[Any], where: str, conversation: Conversation) -> None:
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = object_of(block, place).get("type")
        if isinstance(kind, str) and kind in texts:
            texts[kind].append(text_of(block, kind, place))
        elif kind == "tool_use":
            given = object_of(block.get("input") or {}, f"{place}.input")
            function = {"name": text_of(block, "name", place), "arguments": given}
            call = {"id": text_of(block, "id", place), "type": "function"}
            calls.append(call | {"function": read_tool_call(function, place)})
        else:
            raise unsupported(f"{place}.type", kind)
    answer_texts = texts["text"] if any(texts["text"]) else ()
    conversation.add_answer(answer_texts, "".join(texts["thinking"]) or None, calls)


def _content(content: Any, where: str, conversation: Conversation) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        part
        for index, block in enumerate(list_of(content, where, "text or a list of blocks"))
        for part in _parts(block, f"{where}[{index}]", conversation)
    ]


def _parts(block: Any, where: str, conversation: Conversation) -> list[dict[str, Any]]:
    """Convert a block to content parts for the chat template."""
    kind = object_of(block, where).get("type")
    if kind == "text":
        return [text_part(text_of(block, "text", where))]
    if kind == "image":
        return [_image(block, where, conversation)]
    if kind == "document":
        return _document(block, where, conversation)
    raise unsupported(f"{where}.type", kind)


def _document(
    block: Mapping[str, Any], where: str, conversation: Conversation
) -> list[dict[str, Any]]:
    """Convert a text document to parts, between tags that mark its start and end."""
    place = f"{where}.source"
    source = object_of(block.get("source"), place)
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise unsupported(f"{where}.citations", citations)
    inside: list[dict[str, Any]]
    if source.get("type") == "text":
        if source.get("media_type") != "text/plain":
            raise unsupported(f"{place}.media_type", source.get("media_type"))
        inside = [text_part(text_of(source, "data", place))]
    elif source.get("type") == "content":
        content = _content(source.get("content"), f"{place}.content", conversation)
        inside = [text_part(content)] if isinstance(content, str) else content
    else:
        raise unsupported(f"{place}.type", source.get("type"))
    named = {name: block[name] for name in ("title", "context") if block.get(name) is not None}
    head = "".join(f"<{name}>{text_of(named, name, where)}</{name}>\n" for name in named)
    parts = [text_part(f"<document>\n{head}"), *inside, text_part("\n</document>\n")]
    if any(part["type"] != "text" for part in inside):
        return parts
    return [text_part("".join(part["text"] for part in parts))]


def _image(block: Mapping[str, Any], where: str, conversation: Conversation) -> dict[str, Any]:
    place = f"{where}.source"
    source = object_of(block.get("source"), place)
    if source.get("type") == "base64":
        form, data = text_of(source, "media_type", place), text_of(source, "data", place)
        head, url, place = f"data:{form};base64,", data, f"{place}.data"
    elif source.get("type") == "url":
        head, url, place = "", text_of(source, "url", place), f"{place}.url"
    else:
        raise unsupported(f"{place}.type", source.get("type"))
    return conversation.medium(MediaPart("image", url, {}, place, url_only=True, head=head))
