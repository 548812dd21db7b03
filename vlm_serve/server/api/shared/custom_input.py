"""Calls of tools that take one text: the model writes it as the only argument of a function."""

from __future__ import annotations

from pydantic_core import from_json

from vlm_serve.server.answers.json_calls import decodable

_BEGINNING = '{"input": "'


def input_of(arguments: str) -> str:
    """Return the one text of a call's arguments, which the token limit may have cut."""
    given = from_json(arguments or "{}", allow_partial="trailing-strings")
    text = given.get("input", "") if isinstance(given, dict) else ""
    return text if isinstance(text, str) else arguments


class CustomInput:
    """The text of a call whose arguments are still coming.

    Arguments in another form than that of one text are told when they are complete.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._begun = False
        self._told = 0

    def grow(self, arguments: str) -> str:
        """Take more of the arguments and return more of the text."""
        self._unread += arguments
        if not self._begun and self._unread.startswith(_BEGINNING):
            self._begun, self._unread = True, self._unread.removeprefix(_BEGINNING)
        if not self._begun:
            return ""
        text, size = decodable(self._unread)
        self._unread = self._unread[size:]
        self._told += len(text)
        return text

    def rest(self, text: str) -> str:
        """Return what is left of the whole text."""
        return text[self._told :]
