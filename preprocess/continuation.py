"""The last message of a conversation, left open for the model to continue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.thoughts import THINK_END, THINK_START

Message = dict[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")


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
