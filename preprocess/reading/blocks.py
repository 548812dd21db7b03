"""Reads the blocks of Anthropic's Messages form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.chat import read_tool_call
from vlm_serve.preprocess.reading.conversation import Conversation, MediaPart, text_part
from vlm_serve.preprocess.reading.parts import (
    document,
    document_at,
    file_content,
    stored_file,
    url_or_name,
)
from vlm_serve.preprocess.reading.values import list_of, object_of, text_of, unsupported
from vlm_serve.preprocess.reading.vendor_tools import read_block_tools

_BILLING = "x-anthropic-billing-header"
# What only Anthropic's servers can read or run. A client merely sends back what it got from them.
_DROPPED = frozenset(
    {
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "container_upload",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)
_TEXTS = {"text": "text", "compaction": "content"}
"""Blocks that are a text, and where it is; a compaction's is a summary of earlier turns."""
_DOCUMENTS = {"document": ("title", "context"), "search_result": ("source", "title")}
"""Blocks with a text or pages inside, and what else they say of it."""


def read_blocks(body: Mapping[str, Any], conversation: Conversation) -> None:
    """Read a Messages body's system prompt, messages and tools.

    Raises InvalidRequestError, naming the block and field at fault.
    """
    messages = list_of(body.get("messages"), "messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    conversation.tools = read_block_tools(body.get("tools"), conversation)
    if system := _without_billing(body.get("system"), conversation):
        conversation.add_system(_content(system, "system", conversation), "system")
    role = ""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = text_of(object_of(message, where), "role", where)
        content = message.get("content") or ""
        if role == "system":
            read = _content(content, f"{where}.content", conversation)
            conversation.add_system(read, f"{where}.role")
            continue
        where += ".content"
        if isinstance(content, str):
            conversation.messages.append({"role": role, "content": content})
        elif role == "assistant":
            _read_answer(list_of(content, where), where, conversation)
        else:
            _read_user(list_of(content, where), where, conversation)
    conversation.continue_final_message = role == "assistant"
    conversation.add_generation_prompt = role != "assistant"


def _without_billing(system: Any, conversation: Conversation) -> Any:
    """Return the system prompt without the blocks that hold headers for billing.

    Their hashes differ with every request, so they would make every prompt new.
    """
    if not isinstance(system, list):
        return system
    kept = []
    for index, block in enumerate(system):
        text = block.get("text") if isinstance(block, Mapping) else None
        if isinstance(text, str) and text.startswith(_BILLING):
            conversation.ignored.append(f"system[{index}]")
        else:
            kept.append(block)
    return kept


def _is_dropped(block: Any, place: str, conversation: Conversation) -> bool:
    """Return True for a block without meaning here, and name it."""
    kind = object_of(block, place).get("type")
    empty = kind == "compaction" and not block.get("content")
    if not empty and (not isinstance(kind, str) or kind not in _DROPPED):
        return False
    conversation.ignored.append(place)
    return True


def _read_user(blocks: Sequence[Any], where: str, conversation: Conversation) -> None:
    """Read a user's turn; each tool result becomes a separate message, in order."""
    parts: list[dict[str, Any]] | None = None
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if _is_dropped(block, place, conversation):
            continue
        if block.get("type") == "tool_result":
            parts = None
            call_id = text_of(block, "tool_use_id", place)
            conversation.in_result = True
            result = _content(block.get("content") or "", f"{place}.content", conversation)
            conversation.in_result = False
            conversation.add_result(call_id, result, f"{place}.tool_use_id")
            continue
        if parts is None:
            parts = []
            conversation.messages.append({"role": "user", "content": parts})
        parts += _parts(block, place, conversation)


def _read_answer(blocks: Sequence[Any], where: str, conversation: Conversation) -> None:
    texts, thoughts = list[str](), list[str]()
    calls = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if _is_dropped(block, place, conversation):
            continue
        kind = block.get("type")
        if isinstance(kind, str) and kind in _TEXTS:
            texts.append(text_of(block, _TEXTS[kind], place))
        elif kind == "thinking":
            thoughts.append(text_of(block, kind, place))
        elif kind == "tool_use":
            given = object_of(block.get("input") or {}, f"{place}.input")
            function = {"name": text_of(block, "name", place), "arguments": given}
            call = {"id": text_of(block, "id", place), "type": "function"}
            calls.append(call | {"function": read_tool_call(function, place)})
        else:
            raise unsupported(f"{place}.type", kind)
    conversation.add_answer(texts if any(texts) else (), "".join(thoughts) or None, calls)


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
    if isinstance(kind, str) and kind in _TEXTS:
        return [text_part(text_of(block, _TEXTS[kind], where))]
    if kind == "image":
        return [_image(block, where, conversation)]
    if kind == "tool_reference":  # The tool that a search found; its definition is in `tools`.
        return [text_part(f"<tool>{text_of(block, 'tool_name', where)}</tool>")]
    if isinstance(kind, str) and kind in _DOCUMENTS:
        citations = block.get("citations")
        if isinstance(citations, Mapping) and citations.get("enabled"):
            conversation.ignored.append(f"{where}.citations")
        given = [name for name in _DOCUMENTS[kind] if block.get(name) is not None]
        named = {name: text_of(block, name, where) for name in given}
        if kind == "search_result":
            return document(_inside(block, where, conversation), named, kind)
        media = len(conversation.media)
        try:
            return document(_document(block, named.get("title", ""), where, conversation), named)
        except InvalidRequestError as error:
            if not conversation.in_result:
                raise
            del conversation.media[media:]
            return [conversation.unread(error, where)]
    raise unsupported(f"{where}.type", kind)


def _document(
    block: Mapping[str, Any], title: str, where: str, conversation: Conversation
) -> list[dict[str, Any]]:
    """Convert what a document has inside to parts."""
    place = f"{where}.source"
    source = object_of(block.get("source"), place)
    kind = source.get("type")
    if kind == "text":
        form = source.get("media_type")
        if form is not None and not str(form).startswith("text/"):
            raise unsupported(f"{place}.media_type", form)
        return [text_part(text_of(source, "data", place))]
    if kind == "content":
        return _inside(source, place, conversation)
    if kind == "base64":
        form, data = text_of(source, "media_type", place), text_of(source, "data", place)
        url = f"data:{form};base64,{data}"
        return [file_content(url, title, f"{place}.data", conversation)]
    if kind == "file":
        return [conversation.medium(stored_file(source, place))]
    if kind == "url":
        return [document_at(text_of(source, "url", place), f"{place}.url", conversation)]
    raise unsupported(f"{place}.type", kind)


def _inside(
    block: Mapping[str, Any], where: str, conversation: Conversation
) -> list[dict[str, Any]]:
    content = _content(block.get("content"), f"{where}.content", conversation)
    return [text_part(content)] if isinstance(content, str) else content


def _image(block: Mapping[str, Any], where: str, conversation: Conversation) -> dict[str, Any]:
    place = f"{where}.source"
    source = object_of(block.get("source"), place)
    if source.get("type") == "base64":
        form, data = text_of(source, "media_type", place), text_of(source, "data", place)
        head, url, place = f"data:{form};base64,", data, f"{place}.data"
    elif source.get("type") == "url":
        url = url_or_name(text_of(source, "url", place), f"{place}.url")
        head, place = "", f"{place}.url"
    elif source.get("type") == "file":
        return conversation.medium(stored_file(source, place, "image"))
    else:
        raise unsupported(f"{place}.type", source.get("type"))
    return conversation.medium(MediaPart("image", url, {}, place, url_only=True, head=head))
