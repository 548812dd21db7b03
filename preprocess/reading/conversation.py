"""A conversation: what a request's prompt consists of, in one form for all APIs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from vlm_serve.errors import InvalidRequestError, MediaNotHeldError

Modality = Literal["image", "video"]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which clients send an answer's reasoning and templates read it."""


def text_part(text: str) -> dict[str, Any]:
    """Return a text part as templates see it."""
    return {"type": "text", "text": text}


@dataclass(frozen=True, slots=True)
class MediaName:
    """Stands for a medium that the server has: its client's `uuid`, a `hash` or a `file_id`."""

    kind: Literal["uuid", "hash", "file_id"]
    text: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.text}"


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """A file that a client has stored at the server; deleting it ends what reads it."""

    path: Path
    num_bytes: int

    def __str__(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One image or video as given in the request.

    Attributes:
        modality: "image" or "video".
        source: a URL or path (str), a `pathlib.Path`, bytes, a PIL image, or uint8 frames; of a
            video also a list of its frames, as pictures of any of these kinds. At a server, also a
            `StoredUpload`, or a `MediaName` before it is looked up.
        options: the part's options, still unchecked.
        param: its place in the request, for errors.
        named: places in the request of options set for all media, by option name.
        url_only: the part has OpenAI's form, and only a URL is a valid source.
        document: the source is a PDF document, or the URL of one or of a text; pages are images.
        head: the beginning of a data: URL whose rest is `source`. Joining them copies an upload.
        uuid: the client's name for it; "": none.
        held: counts the source as memory in use, as long as the part lives.
        on_loaded: told the medium's hash (`medium_hash`), on any thread.
    """

    modality: Modality
    source: Any
    options: Mapping[str, Any]
    param: str
    url_only: bool = False
    named: Mapping[str, str] = field(default_factory=dict)
    head: str = ""
    document: bool = False
    uuid: str = ""
    held: object = None
    on_loaded: Callable[[str], None] | None = field(default=None, compare=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """The medium as a client over HTTP gives it: a URL in pieces, or those of the frames."""
        if isinstance(self.source, list | tuple):
            return tuple(map(str, self.source))
        if isinstance(self.source, MediaName | StoredUpload):
            return (str(self.source),)
        return (self.head, self.source) if self.head else (self.source,)

    def joined(self) -> MediaPart:
        """Return the part with a source in one piece."""
        return replace(self, source=self.head + self.source, head="") if self.head else self


class Uploads(Protocol):
    """The media that a server has of one client."""

    def resolved(self, part: MediaPart) -> MediaPart:
        """Return a part with the source that its name stands for; note one that has a name.

        Raises InvalidRequestError, of the status 404 or 409, if nothing of that name is there.
        """
        ...


Turn = tuple[dict[str, Any], list[MediaPart]]
"""A message and its media."""


@dataclass(frozen=True, slots=True)
class AskedMark:
    """A mark as it was read.

    Attributes:
        sign: the text in its place in the second reading.
        seconds: how long what it marks is to stay.
        ttl: that time as the client wrote it; None: it gave none.
        place: in the request.
    """

    sign: str
    seconds: float
    ttl: str | None
    place: str


@dataclass(slots=True)
class CacheWishes:
    """Wishes of a client for the cache, for one prompt.

    Attributes:
        marks: in the order of the prompt, the latest four.
        marked: the conversation with the signs of the marks in it; None: there are no marks.
        signs: matches the signs, also those of marks that do not count.
        seconds: how long the prompt's end is to stay, too; None: as long as there is room.
        uncached: nothing is to be read from the cache, and nothing written.
    """

    marks: list[AskedMark] = field(default_factory=list)
    marked: Conversation | None = None
    signs: re.Pattern[str] | None = None
    seconds: float | None = None
    uncached: bool = False


@dataclass(slots=True)
class Conversation:
    """The content of a request's prompt, still without a template.

    Attributes:
        messages: the messages as templates see them, with arguments of tool calls as objects.
        media: the media of all messages, in order of appearance.
        tools: function definitions as templates see them.
        template_kwargs: further variables of the template.
        media_io_kwargs, mm_processor_kwargs: options of all media, as vLLM names them.
        add_generation_prompt: end with the beginning of an assistant's turn.
        continue_final_message: leave the last message open for the model to continue.
        prompts: texts or token ids without a template, in place of messages.
        previous: id of the response that this conversation continues.
        past_at: index of the message before which the turns of `previous` belong.
        cache_salt: the salt that the client chose, if any.
        system_places: places in the request of the messages with the role "system", in order.
        result_places: places in the request of the ids of the tool results, in its order.
        ignored: places in the request of what has no effect here, or another one than named.
        references: places of items that only name an item of a stored response. They are left out.
        cache: what the client asks of the cache.
        in_result: what is being read belongs to the result of a tool.
        answer_ids: tokens with which the answer begins, whose prompt nobody continues; None: any.
        uploads: finds media by their names; None: names stay.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    media: list[MediaPart] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    media_io_kwargs: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    prompts: list[str] | list[list[int]] | None = None
    previous: str | None = None
    past_at: int = 0
    cache_salt: str | None = None
    system_places: list[str] = field(default_factory=list)
    result_places: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)
    cache: CacheWishes = field(default_factory=CacheWishes)
    in_result: bool = False
    answer_ids: tuple[int, ...] | None = None
    uploads: Uploads | None = None

    @property
    def names_media(self) -> bool:
        """True if there are media or options of media."""
        return bool(
            self.media or self.media_io_kwargs is not None or self.mm_processor_kwargs is not None
        )

    def add_system(self, content: Any, place: str) -> None:
        """Append a system message that stands at a place of the request."""
        self.messages.append({"role": "system", "content": content})
        self.system_places.append(place)

    def add_answer(
        self, texts: Sequence[str], reasoning: str | None, calls: list[dict[str, Any]]
    ) -> None:
        """Append an earlier answer, with its calls as `read_tool_call` returns them."""
        parts = list(map(text_part, texts))
        content = parts if len(parts) > 1 else parts[0]["text"] if parts else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            message |= dict.fromkeys(REASONING_KEYS, reasoning)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def add_result(self, call_id: str, content: Any, place: str) -> None:
        """Append the result of a call, whose id stands at a place of the request."""
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        self.result_places.append(place)

    def medium(self, medium: MediaPart) -> dict[str, Any]:
        """Collect a medium and return the part that represents it."""
        self.media.append(medium if self.uploads is None else self.uploads.resolved(medium))
        # Templates check the type or a key of that name, never the value.
        return {"type": medium.modality, medium.modality: medium.modality}

    def unread(self, error: InvalidRequestError, place: str) -> dict[str, Any]:
        """Name an unreadable document in `ignored`; return the text that takes its place. Raise
        MediaNotHeldError again.

        Clients send a tool's result with every later turn: an error would end the conversation.
        """
        if isinstance(error, MediaNotHeldError):  # the client can send it again
            raise error
        if place not in self.ignored:
            self.ignored.append(place)
        why = error.message.removeprefix(error.param or "").lstrip(": ")
        return text_part(f"This document cannot be shown: {why}.")

    def put_past(self, past: Conversation) -> None:
        """Put earlier turns before the first turn; instructions stay in front."""
        systems = sum(message["role"] == "system" for message in self.messages[: self.past_at])
        self.messages[self.past_at : self.past_at] = past.messages
        self.system_places[systems:systems] = past.system_places
        self.result_places[:0] = past.result_places
        self.media[:0] = past.media

    def turns(self) -> list[Turn]:
        """Return the messages, each with its media."""
        turns, start = [], 0
        for message in self.messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else ()
            end = start + sum(part["type"] != "text" for part in parts)
            turns.append((message, self.media[start:end]))
            start = end
        return turns

    def default_kwargs(self, **kwargs: Any) -> None:
        """Set template variables that the client has not set; None sets nothing."""
        given = {name: value for name, value in kwargs.items() if value is not None}
        self.template_kwargs = given | self.template_kwargs

    @property
    def functions(self) -> dict[str, Any]:
        """Schemas of the tools' parameters, by function name."""
        return schemas_of(self.tools)


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schemas of the parameters of valid tools, by function name."""
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") for function in functions}
