"""Checks chat messages and turns them into what templates read, media set aside in order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.prompt import Modality
from vlm_serve.preprocess.typed_text import plain_data

# "developer" is OpenAI's newer name of the system role; templates know only the old one.
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
# What clients send that has nothing to say here: cache marks of other services, ids that are no
# identity here, and the type of a file, which is read from the file.
_IDLE = frozenset({"cache_control", "uuid", "format"})
# Options of transformers' processors that would change what the model was trained to see.
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
"""Of one tool call that comes as JSON text."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One image or video as the request names it.

    Attributes:
        modality: what it is.
        source: a URL or path (str), a `pathlib.Path`, bytes, a PIL image, or uint8 frames.
        options: the per-part options that were given, still unchecked.
        param: where it stands in the request, for errors.
        named: where those options stand that the part does not have itself.
        url_only: the part is of OpenAI's form, in which only a URL is a source.
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

    Every API's form of a conversation is read into this one.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    media: list[MediaPart] = field(default_factory=list)

    def add(self, message: Any, param: str) -> None:
        """Checks a message in OpenAI's form and appends it.

        Args:
            param: where it stands in the request, for errors.

        Raises InvalidRequestError that names the part and field at fault.
        """
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{param} must be an object", param=param)
        self.messages.append(_read_message(message, param, self))

    def add_turn(self, role: Any, content: Any, param: str, **others: str) -> None:
        """Appends a message whose content is text or parts as `part` and `medium` return them.

        Raises InvalidRequestError for an unknown role.
        """
        self.messages.append({"role": _read_role(role, param), "content": content, **others})

    def add_answer(
        self, texts: Sequence[str], reasoning: str | None, calls: list[dict[str, Any]]
    ) -> None:
        """Appends an earlier answer; the calls are as `read_tool_call` returns them."""
        parts = [{"type": "text", "text": text} for text in texts]
        content = parts if len(parts) > 1 else parts[0]["text"] if parts else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            message |= dict.fromkeys(_REASONING, reasoning)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def part(self, part: Any, param: str) -> dict[str, Any]:
        """A part in OpenAI's form as templates read it; a medium is set aside. Raises as `add`."""
        return _read_part(part, param, self)

    def medium(self, medium: MediaPart) -> dict[str, Any]:
        """Sets a medium aside; returns the part that stands for it."""
        self.media.append(medium)
        # Templates look for the type or for a key of that name; none looks at the value.
        return {"type": medium.modality, medium.modality: medium.modality}


def read_messages(messages: Any) -> Conversation:
    """Checks messages in OpenAI's form (Python parts `image` and `video` included).

    Raises InvalidRequestError that names the message, part and field at fault.
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
            f"{param}.role must be one of {', '.join(_ROLES)}, not {_shown(role)}",
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
            f"{param}.type must be one of {known}, not {_shown(kind)}", param=f"{param}.type"
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
    known = _OPTIONS[modality] | _IDLE | {"type", kind, f"{modality}_url", modality, "url"}
    given = {key: value for key, value in options.items() if value is not None}
    for key in given.keys() - known:
        raise InvalidRequestError(
            f"{param}.{_shown(key)} is no option of {modality}s: those are "
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
    """A call as templates read it: OpenAI sends arguments as JSON text, they want the object.

    Args:
        call: a function's name and arguments, or an object that has them as `function`.
        param: where it stands in the request, for errors.

    Raises InvalidRequestError.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{param} must name a function", param=param)
    place = f"{param}.function.arguments" if "function" in call else f"{param}.arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        if len(arguments) > MAX_ARGUMENTS_CHARACTERS:  # parsing it would hold everyone up
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
    """Checks tool definitions; None and an empty list mean no tools.

    Raises InvalidRequestError that names the tool at fault.
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


def _shown(value: Any) -> str:
    """A client's value in an error message, short."""
    shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return shown if len(shown) <= 40 else shown[:37] + "..."
