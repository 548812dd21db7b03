"""Checks chat messages and converts them into template input; collects their media in order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.prompt import Modality
from vlm_serve.preprocess.typed_text import plain_data

# "developer" is OpenAI's newer name for the system role; templates know only the old one.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_MEDIA_PARTS: dict[str, Modality] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
_OPTIONS: dict[Modality, frozenset[str]] = {
    "image": frozenset({"detail", "downsample_mode", "max_pixels", "max_slice_nums", "min_pixels"}),
    "video": frozenset(
        {
            "downsample_mode",
            "fps",
            "max_frame_pixels",
            "max_frames",
            "max_slice_nums",
            "num_frames",
            "sample_fps",
            "sampling",
        }
    ),
}
# Accepted and ignored: other services' cache hints, ids (content hashes identify media), and file
# types (the file itself gives its type).
_IGNORED = frozenset({"cache_control", "uuid", "format"})
# Rejected: processor options of transformers that would give pixels unlike the training data.
_REFUSED = frozenset(
    {
        "do_convert_rgb",
        "do_normalize",
        "do_rescale",
        "do_resize",
        "do_sample_frames",
        "image_mean",
        "image_std",
        "mean",
        "merge_size",
        "patch_size",
        "resample",
        "rescale_factor",
        "resized_height",
        "resized_width",
        "size",
        "std",
        "temporal_patch_size",
        "total_pixels",
    }
)
MAX_ARGUMENTS_CHARACTERS = 1 << 20
"""Limit on the JSON text of one tool call's arguments."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One image or video as given in the request.

    Attributes:
        modality: "image" or "video".
        source: a URL or path (str), a `pathlib.Path`, bytes, a PIL image, or uint8 frames.
        options: the part's options, still unchecked.
        param: its place in the request, for errors.
        named: places in the request of options set for all media, by option name.
        url_only: the part has OpenAI's form, and only a URL is a valid source.
    """

    modality: Modality
    source: Any
    options: Mapping[str, Any]
    param: str
    url_only: bool = False
    named: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as plain data for the template, and their media in order of appearance.

    The conversation forms of all APIs are read into this one.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    media: list[MediaPart] = field(default_factory=list)

    def add(self, message: Any, param: str) -> None:
        """Check a message in OpenAI's form and append it.

        Args:
            param: its place in the request, for errors.

        Raises InvalidRequestError, naming the part and field at fault.
        """
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{param} must be an object", param=param)
        self.messages.append(_read_message(message, param, self))

    def add_turn(self, role: Any, content: Any, param: str, **others: str) -> None:
        """Append a message whose content is text or a list of parts from `part` and `medium`.

        Raises InvalidRequestError for an unknown role.
        """
        self.messages.append({"role": _read_role(role, param), "content": content, **others})

    def add_answer(
        self, texts: Sequence[str], reasoning: str | None, calls: list[dict[str, Any]]
    ) -> None:
        """Append an earlier answer, with its calls as `read_tool_call` returns them."""
        parts = [{"type": "text", "text": text} for text in texts]
        content = parts if len(parts) > 1 else parts[0]["text"] if parts else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            message |= dict.fromkeys(_REASONING, reasoning)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def part(self, part: Any, param: str) -> dict[str, Any]:
        """Convert a part in OpenAI's form for templates; a medium is collected. Raises as `add`."""
        return _read_part(part, param, self)

    def medium(self, medium: MediaPart) -> dict[str, Any]:
        """Collect a medium and return the part that represents it."""
        self.media.append(medium)
        # Templates check the type or a key of that name, never the value.
        return {"type": medium.modality, medium.modality: medium.modality}


def read_messages(messages: Any) -> Conversation:
    """Check messages in OpenAI's form (Python parts `image` and `video` included).

    Raises InvalidRequestError, naming the message, part and field at fault.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError("messages must be a list", param="messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    conversation = Conversation()
    for index, message in enumerate(messages):
        conversation.add(message, f"messages[{index}]")
    return conversation


def _read_message(
    message: Mapping[str, Any], param: str, conversation: Conversation
) -> dict[str, Any]:
    role = _read_role(message.get("role"), param)
    others = {key: value for key, value in message.items() if key not in ("role", "content")}
    read: dict[str, Any] = {
        "role": role,
        "content": _read_content(message.get("content"), f"{param}.content", conversation),
    }
    if read["content"] is None and role != "assistant":
        if "content" not in message:
            raise InvalidRequestError(f"{param}.content is missing", param=f"{param}.content")
        read["content"] = ""
    for key, value in others.items():
        if value is not None:
            read[key] = plain_data(value, f"{param}.{key}")
    if "tool_calls" in read:
        read["tool_calls"] = _read_tool_calls(read["tool_calls"], f"{param}.tool_calls")
    reasoning = next((read[key] for key in _REASONING if read.get(key) is not None), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise InvalidRequestError(f"{param}.reasoning_content must be text", param=param)
        read |= {"thinking": read.get("thinking", reasoning), "reasoning_content": reasoning}
    return read


def _read_role(role: Any, param: str) -> str:
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(
            f"{param}.role must be one of {', '.join(_ROLES)}, not {_short_repr(role)}",
            param=f"{param}.role",
        )
    return _ROLES[role]


def _read_content(content: Any, param: str, conversation: Conversation) -> Any:
    if content is None or isinstance(content, str):
        return None if content is None else str(content)
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{param} must be text or a list of parts", param=param)
    return [conversation.part(part, f"{param}[{index}]") for index, part in enumerate(content)]


def _read_part(part: Any, param: str, conversation: Conversation) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{param} must be an object", param=param)
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXT_PARTS:
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{param}.text must be text", param=f"{param}.text")
        return {"type": "text", "text": str(text)}
    if not isinstance(kind, str) or kind not in _MEDIA_PARTS:
        known = ", ".join(sorted({"text", *_MEDIA_PARTS}))
        raise InvalidRequestError(
            f"{param}.type must be one of {known}, not {_short_repr(kind)}", param=f"{param}.type"
        )
    return conversation.medium(_read_media(part, kind, param))


def _read_media(part: Mapping[str, Any], kind: str, param: str) -> MediaPart:
    modality = _MEDIA_PARTS[kind]
    name = next((key for key in (kind, f"{modality}_url", modality, "url") if key in part), None)
    if name is None:
        raise InvalidRequestError(f"{param}.{kind} is missing", param=f"{param}.{kind}")
    source, options = part[name], dict(part)
    if isinstance(source, Mapping):
        options |= source
        source = source.get("url")
        name += ".url"
    for key in options.keys() & _REFUSED:
        raise InvalidRequestError(
            f"{param}.{key} cannot be set per request", param=f"{param}.{key}"
        )
    if source is None:
        raise InvalidRequestError(f"{param}.{name} is missing", param=f"{param}.{name}")
    known = _OPTIONS[modality] | _IGNORED | {"type", kind, f"{modality}_url", modality, "url"}
    given = {key: value for key, value in options.items() if value is not None}
    for key in given.keys() - known:
        raise InvalidRequestError(
            f"{param}.{_short_repr(key)} is not an option for {modality}s: the options are "
            + ", ".join(sorted(_OPTIONS[modality])),
            param=param,
        )
    given = {key: given[key] for key in _OPTIONS[modality] & given.keys()}
    return MediaPart(modality, source, given, f"{param}.{name}", url_only=kind != modality)


def _read_tool_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{param} must be a list", param=param)
    return [read_tool_call(call, f"{param}[{index}]") for index, call in enumerate(calls)]


def read_tool_call(call: Any, param: str) -> dict[str, Any]:
    """Convert a tool call for templates: parse OpenAI's JSON text of arguments into an object.

    Args:
        call: a function's name and arguments, or an object with them in `function`.
        param: its place in the request, for errors.

    Raises InvalidRequestError.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{param} must name a function", param=param)
    place = f"{param}.function.arguments" if "function" in call else f"{param}.arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        if len(arguments) > MAX_ARGUMENTS_CHARACTERS:  # parsing it would block all requests
            raise InvalidRequestError(
                f"{place} must have at most {MAX_ARGUMENTS_CHARACTERS} characters", param=place
            )
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{place} must be a JSON object", param=place)
    function = function | {"arguments": plain_data(arguments, place)}
    return call | {"function": function} if "function" in call else function


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Check tool definitions; None and an empty list mean no tools.

    Raises InvalidRequestError, naming the tool at fault.
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise InvalidRequestError("tools must be a list", param="tools")
    read = []
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        plain = plain_data(tool, param)
        function = plain.get("function", plain) if isinstance(plain, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{param} must describe a function by name", param=param)
        read.append(plain)
    return read or None


def _short_repr(value: Any) -> str:
    """Format a client's value for an error message, shortened."""
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
