"""Reads a request body of any API turn by turn, as far as affinity keys need it.

Checks nothing else. Unreadable content raises, and the keys end there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_ARGUMENTS_CHARACTERS = 1 << 20
"""Limit on a tool call's JSON text; a longer one is not parsed but hashed as it is."""

_ROLES = {"developer": "system"}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT = frozenset({"text", "input_text", "output_text", "refusal"})
_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
# Keys of a medium that are not options: its sources, and fields without effect on the prompt.
_NO_OPTIONS = frozenset({*_MEDIA, "type", "url", "cache_control", "uuid", "format"})
_OPTIONS = ("media_io_kwargs", "mm_processor_kwargs", "chat_template_kwargs")
# Templates read this switch at the end of a prompt: everything before is the same either way.
_AT_THE_END = "enable_thinking"


@dataclass(frozen=True, slots=True)
class Medium:
    """An image or a video.

    Attributes:
        kind: "image" or "video".
        source: a URL, data: URLs included, in pieces.
        options: the options of this medium alone, as JSON.
    """

    kind: str
    source: tuple[str, ...]
    options: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: a function's name and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning before an answer."""

    text: str


Part = str | Medium | Call | Reasoning
Turn = tuple[str, list[Part]]
"""A role and its content, in order."""


@dataclass(frozen=True, slots=True)
class Said:
    """A request's prompt.

    Attributes:
        turns: the turns of a conversation, read lazily: a malformed one raises when it is reached.
        tokens: the ids of a prompt given as token ids; None for a conversation or a text.
        front: fields that come before all turns or change all of them, by name.
    """

    turns: Iterable[Turn]
    tokens: list[int] | None = None
    front: Mapping[str, str] = field(default_factory=dict)


def read_body(api: str, body: Mapping[str, Any]) -> Said:
    """Read the prompt of a parsed request body.

    Args:
        api: "chat", "completions", "responses", "messages" or "generate".

    Raises KeyError, TypeError or ValueError if it is malformed.
    """
    if api in ("completions", "generate"):
        return _plain(body["prompt" if api == "completions" else "token_ids"])
    read = {"chat": _chat, "responses": _responses, "messages": _messages}[api]
    front = {}
    if body.get("tools"):
        front["tools"] = _json([_tool(tool) for tool in body["tools"]])
    options = {name: _given(body.get(name)) for name in _OPTIONS}
    if any(options.values()):
        front["options"] = _json(options, sort=True)
    if body.get("previous_response_id"):
        front["after"] = str(body["previous_response_id"])
    return Said(read(body), front=front)


def _plain(prompt: Any) -> Said:
    """Read a prompt of text or token ids; take the first of several."""
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Said([("prompt", [prompt])])
    return Said([], tokens=prompt)


def _json(value: Any, *, sort: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=sort, separators=(",", ":"))


def _given(options: Any) -> Any:
    """Drop options without a value and those read only at a prompt's end."""
    if not isinstance(options, dict):
        return options
    return {
        name: value for name, value in options.items() if value is not None and name != _AT_THE_END
    }


def _tool(tool: Mapping[str, Any]) -> list[Any]:
    """Return a tool's name, description and parameters, independent of the API's form."""
    function = tool.get("function", tool)
    parameters = function.get("parameters", function.get("input_schema"))
    return [function["name"], function.get("description"), parameters or {}]


# Chat


def _chat(body: Mapping[str, Any]) -> Iterator[Turn]:
    for message in body["messages"]:
        role = _ROLES.get(message["role"], message["role"])
        parts = [_reasoning(message)] + _parts(message.get("content"))
        parts += [_call(call.get("function", call)) for call in message.get("tool_calls") or ()]
        yield role, [part for part in parts if part is not None]


def _reasoning(message: Mapping[str, Any]) -> Reasoning | None:
    text = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return Reasoning(text) if text else None


def _parts(content: Any) -> list[Part | None]:
    if content is None or isinstance(content, str):
        return [content] if content else []
    return [_part(part) for part in content]


def _part(part: Mapping[str, Any]) -> Part:
    kind = part["type"]
    if kind in _TEXT:
        text: str = part["refusal"] if kind == "refusal" and "refusal" in part else part["text"]
        return text
    modality = _MEDIA[kind]
    name = next(key for key in (kind, f"{modality}_url", modality, "url") if key in part)
    source, options = part[name], dict(part)
    if isinstance(source, Mapping):
        options |= source
        source = source["url"]
    options = {
        key: value for key, value in options.items() if value is not None and key not in _NO_OPTIONS
    }
    return Medium(modality, (source,), _json(options, sort=True) if options else "")


def _call(function: Mapping[str, Any]) -> Call:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str) and len(arguments) <= MAX_ARGUMENTS_CHARACTERS:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return Call(function["name"], str(arguments))
    return Call(function["name"], arguments if isinstance(arguments, str) else _json(arguments))


# Responses


def _responses(body: Mapping[str, Any]) -> Iterator[Turn]:
    """Yield the turns of a Responses body; one answer's reasoning, text and calls make one turn."""
    if body.get("instructions"):
        yield "system", [body["instructions"]]
    given = body["input"]
    if isinstance(given, str):
        yield "user", [given]
        return
    answer = _Answer()
    for item in given:
        kind = item.get("type", "message")
        if kind == "reasoning":
            text = _joined(item.get("content") or item.get("summary") or [])
            answer.reasoning = Reasoning(text) if text else None
        elif kind == "function_call":
            answer.calls.append(_call(item))
        elif kind == "message" and item["role"] == "assistant":
            if answer.text is not None:
                yield from answer.take()
            answer.text = _joined(item["content"])
        else:
            yield from answer.take()
            role = "tool" if kind == "function_call_output" else item["role"]
            content = item["output" if role == "tool" else "content"]
            parts = [part for part in _parts(content) if part is not None]
            yield _ROLES.get(role, role), parts
    yield from answer.take()


class _Answer:
    """Gathers the items of an earlier answer."""

    def __init__(self) -> None:
        self.reasoning: Reasoning | None = None
        self.text: str | None = None
        self.calls: list[Call] = []

    def take(self) -> Iterator[Turn]:
        """Yield the gathered turn, if there is one, and start over."""
        if self.reasoning or self.text is not None or self.calls:
            texts = [part for part in (self.reasoning, self.text) if part]
            yield "assistant", [*texts, *self.calls]
        self.reasoning, self.text, self.calls = None, None, []


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("refusal") or part["text"] for part in content)


# Messages


def _messages(body: Mapping[str, Any]) -> Iterator[Turn]:
    """Yield the turns of a Messages body; each tool result is a turn of its own."""
    if body.get("system"):
        yield "system", _blocks(body["system"])
    for message in body["messages"]:
        role, content = message["role"], message["content"]
        if isinstance(content, str) or role == "system":
            yield role, _blocks(content)
        elif role == "assistant":
            yield role, _answer_blocks(content)
        else:
            yield from _user_blocks(content)


def _user_blocks(blocks: Iterable[Mapping[str, Any]]) -> Iterator[Turn]:
    parts: list[Part] | None = None
    for block in blocks:
        if block["type"] != "tool_result":
            parts = [*(parts or ()), *_block(block)]
            continue
        if parts is not None:
            yield "user", parts
            parts = None
        yield "tool", _blocks(block.get("content") or "")
    if parts is not None:
        yield "user", parts


def _answer_blocks(blocks: Iterable[Mapping[str, Any]]) -> list[Part]:
    texts: dict[str, str] = {"text": "", "thinking": ""}
    calls: list[Part] = []
    for block in blocks:
        if block["type"] == "tool_use":
            calls.append(_call({"name": block["name"], "arguments": block.get("input") or {}}))
        else:
            texts[block["type"]] += block[block["type"]]
    thoughts: list[Part] = [Reasoning(texts["thinking"])] if texts["thinking"] else []
    return [*thoughts, *filter(None, [texts["text"]]), *calls]


def _blocks(content: Any) -> list[Part]:
    if isinstance(content, str):
        return [content] if content else []
    return [part for block in content for part in _block(block)]


def _block(block: Mapping[str, Any]) -> list[Part]:
    if block["type"] == "text":
        return [block["text"]]
    source = block["source"]
    if block["type"] == "image":
        if source["type"] == "url":
            return [Medium("image", (source["url"],))]
        return [Medium("image", (f"data:{source['media_type']};base64,", source["data"]))]
    if block["type"] != "document":
        raise ValueError("a block of no known type")
    inside = [source["data"]] if source["type"] == "text" else _blocks(source["content"])
    named = [(name, block[name]) for name in ("title", "context") if block.get(name) is not None]
    head = "".join(f"<{name}>{text}</{name}>\n" for name, text in named)
    return [f"<document>\n{head}", *inside, "\n</document>\n"]
