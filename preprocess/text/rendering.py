"""Renders a conversation with a checkpoint's chat template; its media are not loaded yet.

`TypedText` separates special tokens typed by a user from those written by the template. Before
rendering, every special token inside user text is replaced by one private-use character absent from
the request. The rendered text is then cut at real special tokens. The plain pieces get their
original characters back, and the tokenizer reads them as text.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.keys import AdapterIdentity, Roots
from vlm_serve.preprocess.reading.cache_wishes import strings_of
from vlm_serve.preprocess.reading.conversation import CacheWishes, Conversation, MediaPart
from vlm_serve.preprocess.text.family import THINK_END, THINK_START
from vlm_serve.preprocess.text.known_pieces import Encoded
from vlm_serve.preprocess.text.known_turns import Turns
from vlm_serve.preprocess.text.template import ChatTemplate
from vlm_serve.preprocess.text.tokenizer import Tokenizer

Message = dict[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatRequest:
    """Messages, tools and template variables of a request.

    Args:
        turns: the tenant's known turns.

    Raises InvalidRequestError if the template does not accept these messages, or if the last one
    has nothing to continue.

    Attributes:
        messages: the conversation's, fitted to the template.
        tools: function definitions; None if there are none.
        kwargs: further variables of the template.
    """

    def __init__(
        self, conversation: Conversation, template: ChatTemplate, turns: Turns | None = None
    ) -> None:
        self._continuation = None
        self._turns = turns
        if conversation.continue_final_message:
            marked = template.traits.thinking.marked
            self._continuation = Continuation(conversation.messages[-1], marked=marked)
            last = self._continuation.message
            conversation = replace(conversation, messages=[*conversation.messages[:-1], last])
        self._template = template
        self.messages = template.traits.fit(conversation)
        self.tools = conversation.tools or None
        self.kwargs = conversation.template_kwargs
        self._add_generation_prompt = conversation.add_generation_prompt
        self._hidden: tuple[TypedText, list[Message]] | None = None

    def tools_text(self) -> str:
        """Return the tools as JSON, about as long as their rendering."""
        return json.dumps(self.tools, ensure_ascii=False) if self.tools else ""

    def render(self, typed: TypedText) -> str:
        """Render the prompt's text, with user text hidden by `typed`."""
        messages = self._hide(typed)
        if self._continuation is None:
            return self._render(typed, messages, self._add_generation_prompt)
        render = partial(self._render, typed, add_generation_prompt=False)
        return self._continuation.cut(messages, typed.mark, render)

    def render_next_turn(self, typed: TypedText) -> str:
        """Render a possible next prompt: the conversation with an answer and one more user turn."""
        answered = self.messages[-1]["role"] == "assistant"
        roles = ("user",) if answered else ("assistant", "user")
        turns = [self._template.traits.fit_turn(role, "a") for role in roles]
        return self._render(typed, self._hide(typed) + turns, True)

    def render_answered(self, typed: TypedText, answer: Conversation) -> str:
        """Render the next prompt: the conversation with an answer and one more turn. That is the
        results of the answer's calls, or a user's turn.

        Raises InvalidRequestError if the template refuses the answer, or if the answer continues
        the last message in a form that cannot be joined.
        """
        traits, messages = self._template.traits, self.messages
        (said,) = traits.fit(answer)
        if self._continuation is not None:
            messages, said = messages[:-1], _joined(messages[-1], said)
        calls = said.get("tool_calls") or ()
        turns = [
            traits.fit_turn("tool", "a") | {"tool_call_id": call.get("id")} for call in calls
        ] or [traits.fit_turn("user", "a")]
        hidden = self._hide(typed)[: len(messages)]
        return self._render(typed, [*hidden, *typed.hide([said]), *turns], True)

    def render_marked(
        self, typed: TypedText, marked: Conversation, tools: Sequence[Mapping[str, Any]]
    ) -> str:
        """Render a second reading of the conversation, with signs in the places of cache marks.

        Args:
            tools: instead of its own.

        Raises InvalidRequestError if the template refuses it.
        """
        return self._render(
            typed,
            typed.hide(self._template.traits.fit(marked)),
            self._add_generation_prompt,
            tools=tools,
        )

    def _hide(self, typed: TypedText) -> list[Message]:
        """Return the messages with user text hidden, the same objects each time."""
        if self._hidden is None or self._hidden[0] is not typed:
            self._hidden = typed, typed.hide(self.messages)
        return self._hidden[1]

    def _render(
        self,
        typed: TypedText,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        *,
        tools: Sequence[Any] | None = None,
    ) -> str:
        # What is only rendered this once is not remembered.
        once = tools is not None
        text = self._template.render(
            messages,
            tools=typed.hide((list(tools or ()) or None) if once else self.tools),
            add_generation_prompt=add_generation_prompt,
            kwargs=typed.hide(self.kwargs),
            turns=None if once else self._turns,
        )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the messages contain a lone surrogate", param="messages"
            ) from None
        return text


class PromptPiece(NamedTuple):
    """A piece of rendered text in hidden form: a special token, or the text between two of them."""

    text: str
    is_special: bool


def split_pieces(text: str, pattern: re.Pattern[str]) -> Iterator[PromptPiece]:
    """Split a rendered prompt at the template's special tokens; user text is still hidden."""
    at = 0
    for match in pattern.finditer(text):
        if match.start() > at:
            yield PromptPiece(text[at : match.start()], False)
        yield PromptPiece(match.group(), True)
        at = match.end()
    if at < len(text):
        yield PromptPiece(text[at:], False)


def last_pieces(
    tokenizer: Tokenizer, typed: TypedText, pieces: Sequence[PromptPiece], count: int
) -> list[PromptPiece]:
    """Return the end of a prompt without media: at least its last `count` tokens, or all.

    The time is that of encoding about as many tokens.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode_plain(typed.restore(text))

    kept: list[PromptPiece] = []
    wanted = tokenizer.enough(count)
    for piece in reversed(pieces):
        if wanted <= 0:
            break
        at, size = (0, 1) if piece.is_special else tokenizer.find_end(piece.text, wanted, encode)
        kept.append(PromptPiece(piece.text[at:], piece.is_special))
        wanted -= size
    return kept[::-1]


def answer_begun(
    pieces: tuple[PromptPiece, ...], encoded: tuple[Encoded | None, ...], answer: Sequence[int]
) -> tuple[tuple[PromptPiece, ...], tuple[Encoded | None, ...]]:
    """Return the pieces of a prompt with the first tokens of its answer behind them."""
    ids = array("I", answer)
    last = encoded[-1] if encoded else None
    if last is None:
        return (*pieces, PromptPiece("", False)), (*encoded, Encoded(b"", (ids,)))
    return pieces, (*encoded[:-1], Encoded(last.digests, (*last.parts, ids)))


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation that has been read, checked and rendered; its media are yet to be loaded.

    Attributes:
        roots: of the prompt's keys.
        adapter: of the model's weights.
        media: the media to load, in order.
        request: the conversation.
        typed: the special tokens typed by users.
        text: the template's text, with those hidden.
        pieces: that text, split at the template's special tokens.
        encoded: tokens of every piece of text; None for special tokens.
        cut: there are only the last of them, or nobody continues the prompt.
        marks: places in the text up to which the client wants it cached, ascending, with seconds.
        wishes: what else the client asks of the cache.
    """

    roots: Roots
    cache_salt: str
    adapter: AdapterIdentity
    request: ChatRequest
    media: list[MediaPart]
    typed: TypedText
    text: str
    pieces: tuple[PromptPiece, ...]
    encoded: tuple[Encoded | None, ...]
    cut: bool = False
    marks: tuple[tuple[int, float], ...] = ()
    wishes: CacheWishes = field(default_factory=CacheWishes)

    def system_end(self, message_ends: Sequence[int]) -> int:
        """Return the position after a leading system message, 0 if there is none."""
        first_text = next((piece.text for piece in self.pieces if not piece.is_special), "")
        if first_text.lstrip().startswith("system") and message_ends:
            return message_ends[0]
        return 0


def texts_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts in the messages' contents; messages in the form of `Conversation`."""
    texts = []
    for message in messages:
        content = message.get("content")
        for part in [content] if isinstance(content, str) else content or ():
            text = part if isinstance(part, str) else part.get("text")
            if isinstance(text, str):
                texts.append(text)
    return texts


def _joined(start: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Return the message continued by an answer. Raises InvalidRequestError."""
    texts = [message.get("content") for message in (start, rest)]
    if not all(isinstance(text, str) for text in texts) or "reasoning_content" in rest:
        raise InvalidRequestError("the answer does not continue a text", param="messages")
    return start | rest | {"content": "".join(map(str, texts))}


class Continuation:
    """Finds the end of the last message's rendering: of its text, or of a thought that it leaves
    open.

    A thought is open if the message has nothing behind it, or if its text begins with `<think>` and
    has no `</think>`.

    Args:
        message: the last message.
        marked: the template knows thoughts.

    Raises InvalidRequestError if the message has nothing to continue.
    """

    def __init__(self, message: Message, *, marked: bool) -> None:
        thought, text = _reasoning(message), message.get("content")
        if marked and isinstance(text, str) and message["role"] == "assistant":
            start = text.lstrip()
            if start.startswith(THINK_START) and THINK_END not in start and not thought:
                thought, text = start.removeprefix(THINK_START).removeprefix("\n"), None
        self._thought = thought if marked and text is None and not message.get("tool_calls") else ""
        if text is None and not self._thought.strip():
            raise _nothing_to_continue()
        if self._thought.strip():
            message = message | {"content": None} | dict.fromkeys(_REASONING, self._thought)
        else:
            self._thought = ""
        self.message = message

    def cut(
        self, messages: list[Message], mark: str, render: Callable[[list[Message]], str]
    ) -> str:
        """Return the rendered text of messages up to the end of the last one.

        Args:
            messages: the messages; the last one is `message`.
            mark: a text that occurs nowhere else.
            render: renders messages.

        Raises InvalidRequestError if the template does not render that end.
        """
        # A lost blank reveals a template that trims the end of a text; then trim here too.
        ending = mark + " "
        text = render([*messages[:-1], self._ended(messages[-1], ending)])
        at = text.rfind(mark)
        if at < 0 and self._thought:  # The template writes no thought of an answer: write it.
            plain = {key: value for key, value in messages[-1].items() if key not in _REASONING}
            plain["content"] = f"{THINK_START}\n{messages[-1][_REASONING[0]]}"
            text = render([*messages[:-1], _with_text(plain, ending)])
            at = text.rfind(mark)
        if at < 0:
            raise InvalidRequestError(
                "the chat template does not render the message to continue",
                param="continue_final_message",
            )
        return text[:at] if text[at : at + len(ending)] == ending else text[:at].rstrip()

    def _ended(self, message: Message, ending: str) -> Message:
        if not self._thought:
            return _with_text(message, ending)
        return message | {
            key: message[key] + ending for key in _REASONING if isinstance(message.get(key), str)
        }


def _reasoning(message: Message) -> str:
    return next((message[key] for key in _REASONING if isinstance(message.get(key), str)), "")


def _with_text(message: Message, ending: str) -> Message:
    """Return a message with more at the end of its text."""
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": content + ending}
    places = [at for at, part in enumerate(content or ()) if part["type"] == "text"]
    if content is None or not places:
        raise _nothing_to_continue()
    last = places[-1]
    part = content[last] | {"text": content[last]["text"] + ending}
    return message | {"content": [*content[:last], part, *content[last + 1 :]]}


def _nothing_to_continue() -> InvalidRequestError:
    return InvalidRequestError(
        "the last message has no text to continue", param="continue_final_message"
    )


# Shorter texts, such as keys and roles, come again and again.
_SHORT = 16
_PRIVATE_USE = re.compile("[\ue000-\uf8ff]")
_ALL_PRIVATE_USE = tuple(map(chr, range(0xE000, 0xF900)))


class TypedText:
    """Substitutes for the special tokens that users typed in one request.

    Args:
        data: all plain data of the request that reaches the template.
        special_tokens: contents of the special tokens; none holds white space.
        pattern: matches every one of them, the longest first.
    """

    def __init__(self, data: Any, special_tokens: Sequence[str], pattern: re.Pattern[str]) -> None:
        strings = strings_of(data)
        wide = [text for text in strings if not text.isascii()]
        used = {character for text in wide for character in _PRIVATE_USE.findall(text)}
        free = (character for character in _ALL_PRIVATE_USE if character not in used)
        self._pattern = pattern
        try:
            self.mark = next(free)
            self._break = next(free)
            self._substitutes = {token: next(free) for token in special_tokens}
        except StopIteration:
            raise InvalidRequestError("the text uses every private-use character") from None
        self._originals = {character: token for token, character in self._substitutes.items()}
        self._originals[self._break] = ""
        self._hidden = re.compile("[" + "".join(self._originals) + "]")
        self._beginnings, self._ends = _halves(tuple(special_tokens))
        self._hides = False
        self._short: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """Return the same plain data with special tokens replaced, in keys as well."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return {self._hide_text(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return value

    def _hide_text(self, text: str) -> str:
        short = len(text) < _SHORT
        if short and text in self._short:
            return self._short[text]
        shown = text
        text = self._pattern.sub(lambda match: self._substitutes[match.group()], text)
        if (stripped := text.rstrip()).endswith(self._beginnings):
            text = stripped + self._break + text[len(stripped) :]
        if (stripped := text.lstrip()).startswith(self._ends):
            text = text[: len(text) - len(stripped)] + self._break + stripped
        self._hides |= text != shown
        if short:
            self._short[shown] = text
        return text

    def restore(self, text: str) -> str:
        """Return the user's original text for a piece of rendered text."""
        if not self._hides:
            return text
        return self._hidden.sub(lambda match: self._originals[match.group()], text)


@cache
def _halves(special_tokens: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the beginnings and the ends of special tokens.

    Adjacent texts could form one together. So a text that ends with a beginning, or starts with an
    end, gets a break there, inside any trimmable white space.
    """
    sizes = [(token, size) for token in special_tokens for size in range(1, len(token))]
    beginnings, ends = {token[:size] for token, size in sizes}, {t[size:] for t, size in sizes}
    return tuple(beginnings), tuple(ends)
