"""Reading the `system` and `messages` fields of a message request into a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.messages import Conversation, MediaPart, read_tool_call
from vlm_serve.server.api.field_checks import object_of, text_of, unsupported

Content = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class InputMessage:
    """One message of the request."""

    role: str
    content: Content


def read_blocks(system: Content | None, messages: Sequence[InputMessage]) -> Conversation:
    """Read the messages into a conversation.

    Raises:
        InvalidRequestError: a block or field is invalid; the error names it.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    conversation = Conversation()
    if system:
        conversation.add_turn("system", _content(system, "system", conversation), "system")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        place = f"{where}.content"
        if isinstance(message.content, str) or message.role == "system":
            content = _content(message.content, place, conversation)
            conversation.add_turn(message.role, content, where)
        elif message.role == "assistant":
            _read_answer(message.content, place, conversation)
        else:
            _read_user(message.content, place, conversation)
    return conversation


def _read_user(blocks: list[dict[str, Any]], where: str, conversation: Conversation) -> None:
    """Read a user's turn; each tool result becomes a separate message, in order."""
    parts: list[dict[str, Any]] | None = None
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.get("type") == "tool_result":
            parts = None
            call_id = text_of(block, "tool_use_id", place)
            content = _content(block.get("content") or "", f"{place}.content", conversation)
            conversation.add_turn("tool", content, place, tool_call_id=call_id)
            continue
        if parts is None:
            parts = []
            conversation.add_turn("user", parts, where)
        parts += _parts(block, place, conversation)
    if not blocks:
        conversation.add_turn("user", "", where)


def _read_answer(blocks: list[dict[str, Any]], where: str, conversation: Conversation) -> None:
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls = []
    for index, block in enumerate(blocks):
        place, kind = f"{where}[{index}]", block.get("type")
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


def _content(content: Any, where: str, conversation: Conversation) -> Content:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be text or a list of blocks", param=where)
    return [
        part
        for index, block in enumerate(content)
        for part in _parts(block, f"{where}[{index}]", conversation)
    ]


def _parts(block: Any, where: str, conversation: Conversation) -> list[dict[str, Any]]:
    """Convert a block to content parts for the chat template."""
    kind = object_of(block, where).get("type")
    if kind == "text":
        return [_text(text_of(block, "text", where))]
    if kind == "image":
        return [_image(block, where, conversation)]
    if kind == "document":
        return _document(block, where, conversation)
    raise unsupported(f"{where}.type", kind)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


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
        inside = [_text(text_of(source, "data", place))]
    elif source.get("type") == "content":
        content = _content(source.get("content"), f"{place}.content", conversation)
        inside = [_text(content)] if isinstance(content, str) else content
    else:
        raise unsupported(f"{place}.type", source.get("type"))
    named = {name: block[name] for name in ("title", "context") if block.get(name) is not None}
    head = "".join(f"<{name}>{text_of(named, name, where)}</{name}>\n" for name in named)
    parts = [_text(f"<document>\n{head}"), *inside, _text("\n</document>\n")]
    if any(part["type"] != "text" for part in inside):
        return parts
    return [_text("".join(part["text"] for part in parts))]


def _image(block: Mapping[str, Any], where: str, conversation: Conversation) -> dict[str, Any]:
    place = f"{where}.source"
    source = object_of(block.get("source"), place)
    if source.get("type") == "base64":
        form, data = text_of(source, "media_type", place), text_of(source, "data", place)
        url, place = f"data:{form};base64,{data}", f"{place}.data"
    elif source.get("type") == "url":
        url, place = text_of(source, "url", place), f"{place}.url"
    else:
        raise unsupported(f"{place}.type", source.get("type"))
    return conversation.medium(MediaPart("image", url, {}, place, url_only=True))
