"""Separates special tokens typed by a user from those written by the chat template.

Before rendering, every special token inside user text is replaced by one private-use character
absent from the request. The rendered text is then cut at real special tokens. The plain pieces get
their original characters back, and the tokenizer reads them as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from vlm_serve.errors import InvalidRequestError

_PRIVATE_USE = re.compile("[\ue000-\uf8ff]")
_ALL_PRIVATE_USE = tuple(map(chr, range(0xE000, 0xF900)))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


class TypedText:
    """Substitutes for the special tokens that users typed in one request.

    Args:
        data: all plain data of the request that reaches the template.
        special_tokens: contents of the special tokens; none holds white space.
        pattern: matches every one of them, the longest first.
    """

    def __init__(self, data: Any, special_tokens: Sequence[str], pattern: re.Pattern[str]) -> None:
        strings = list(_strings(data))
        used = {found for text in strings for found in _PRIVATE_USE.findall(text)}
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
        # Adjacent texts could form a special token together. So a text that ends with the beginning
        # of one, or starts with the end of one, gets a break there, inside any trimmable white
        # space.
        sizes = [(token, size) for token in special_tokens for size in range(1, len(token))]
        self._beginnings = tuple({token[:size] for token, size in sizes})
        self._ends = tuple({token[size:] for token, size in sizes})

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
        text = self._pattern.sub(lambda match: self._substitutes[match.group()], text)
        if (stripped := text.rstrip()).endswith(self._beginnings):
            text = stripped + self._break + text[len(stripped) :]
        if (stripped := text.lstrip()).startswith(self._ends):
            text = text[: len(text) - len(stripped)] + self._break + stripped
        return text

    def restore(self, text: str) -> str:
        """Return the user's original text for a piece of rendered text."""
        return self._hidden.sub(lambda match: self._originals[match.group()], text)
