"""Counts the characters of raw texts beside a grammar.

A lexer needs states for each counted character. So a lone bound is left out of the grammar, and a
count narrows the mask of the next token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Bounds = tuple[int, int | None]
"""Fewest and most characters of a text; None: any number."""
Lengths = Mapping[str, Mapping[str, Sequence[int | None] | None]]
"""The text with which each call begins -> the name of each parameter -> its bounds, if any."""
NAME, NAME_END, END = b"<parameter=", b">\n", b"\n</parameter>\n"
_CONTINUATIONS = bytes(range(0x80, 0xC0))
_MOST_MASKS = 256


@dataclass(frozen=True, slots=True)
class TextPlace:
    """How far an answer has come.

    Attributes:
        text: its last bytes, perhaps the beginning of a call, of a parameter, or of `END`.
        call: the first text of the open call; None: there is none.
        inside: a parameter's value is open.
        bounds: those of the value, if it has any.
        count: characters of the value before `text`.
    """

    text: bytes = b""
    call: bytes | None = None
    inside: bool = False
    bounds: Bounds | None = None
    count: int = 0


class TokenTexts:
    """The tokens of a vocabulary as parts of a value.

    Args:
        texts: the bytes of each token.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        parts = [_split(text) for text in texts]
        self._heads = np.array([head for head, _, _ in parts], dtype=np.int16)
        self._begun = np.array([begun for _, begun, _ in parts], dtype=np.int16)
        self._closes = np.array([closes for _, _, closes in parts], dtype=bool)
        self.longest = int(self._heads.max(initial=0)) + 2 * len(END)
        """More characters than a token can add, with `END` begun before and behind it."""
        entering = [at for at, text in enumerate(texts) if NAME_END[1:] in text[:-1]]
        self.entering = np.array(entering, dtype=np.int64)
        """Tokens that may end a parameter's tag and begin its value."""
        leaping = [at for at in entering if NAME in texts[at]]
        self.leaping = np.array(leaping, dtype=np.int64)
        """Tokens that may do so from anywhere."""
        self._by_first: dict[bytes, list[int]] = {}
        for at, text in enumerate(texts):
            if text[:1] in END:
                self._by_first.setdefault(text[:1], []).append(at)
        self._packed = lru_cache(_MOST_MASKS)(self._allowed)

    def mask(self, begun: int, missing: int, left: int) -> npt.NDArray[np.uint8]:
        """Return the packed mask of the tokens with which a value can still keep its bounds.

        Args:
            begun: bytes of `END` behind the value's characters.
            missing: characters before them, missing to the fewest.
            left: characters before them, left to the most.
        """
        return self._packed(begun, min(max(missing, 0), self.longest), min(left, self.longest))

    def _allowed(self, begun: int, missing: int, left: int) -> npt.NDArray[np.uint8]:
        # A token that does not go on with END makes it part of the text.
        heads = self._heads + begun
        may_end = (heads >= missing) & (heads <= left)
        may_go_on = ~self._closes & (self._begun < len(END) - 1) & (heads + self._begun <= left)
        allowed: npt.NDArray[np.bool_] = may_end | may_go_on
        rest = END[begun:]
        for token in self._by_first.get(rest[:1], ()) if begun else ():
            text = self.texts[token]
            if text.startswith(rest) or rest.startswith(text):
                size = begun + len(text)
                allowed[token] = _fits(0, min(size, len(END)), (missing, left))
        return np.packbits(allowed, bitorder="little")


class Counter:
    """Follows the values in the calls of one grammar.

    Args:
        lengths: the bounds.
        tokens: the vocabulary.
    """

    def __init__(self, lengths: Lengths, tokens: TokenTexts) -> None:
        self._bounds: dict[bytes, dict[bytes, Bounds | None]] = {
            begin.encode(): {
                name.encode(): None if bounds is None else (bounds[0] or 0, bounds[1])
                for name, bounds in named.items()
            }
            for begin, named in lengths.items()
        }
        self._begins = re.compile(b"|".join(map(re.escape, self._bounds)))
        self._kept = max(map(len, self._bounds)) - 1
        self._tokens = tokens

    def after(self, place: TextPlace, data: bytes) -> TextPlace | None:
        """Return the place after more bytes; None: a bound can no longer be kept."""
        place = replace(place, text=place.text + data)
        while True:
            call = place.call
            if place.inside:
                characters, begun, closed = _split(place.text)
                count = place.count + characters
                if place.bounds is not None and not _fits(count, begun, place.bounds):
                    return None
                if not closed:
                    return replace(place, text=place.text[len(place.text) - begun :], count=count)
                place = TextPlace(place.text.partition(END)[2], call)
            elif call is not None:
                if NAME.startswith(place.text[: len(NAME)]) and NAME_END not in place.text:
                    return place
                if not place.text.startswith(NAME):
                    place = TextPlace(place.text)
                    continue
                name, _, rest = place.text[len(NAME) :].partition(NAME_END)
                place = TextPlace(rest, call, inside=True, bounds=self._bounds[call].get(name))
            else:
                begin = self._begins.search(place.text)
                if begin is None:
                    return TextPlace(place.text[max(0, len(place.text) - self._kept) :])
                place = TextPlace(place.text[begin.end() :], begin.group())

    def token_after(self, place: TextPlace, token: int) -> TextPlace | None:
        """Return the place after a token; None: a bound can no longer be kept."""
        return self.after(place, self._tokens.texts[token])

    def narrow(self, place: TextPlace, bits: npt.NDArray[np.uint8]) -> None:
        """Remove the tokens that break a bound from a packed mask."""
        tokens = self._tokens
        if place.bounds is not None:
            least, most = place.bounds
            begun, missing = len(place.text), least - place.count
            left = tokens.longest if most is None else most - place.count
            if missing > 0 or left < tokens.longest:
                mask = tokens.mask(begun, missing, left)
                bits[: len(mask)] &= mask
        naming = place.call is not None and not place.inside
        listed = tokens.entering if naming else tokens.leaping
        for token in listed[(bits[listed // 8] >> (listed % 8) & 1).astype(bool)].tolist():
            if self.token_after(place, token) is None:
                bits[token // 8] &= ~(1 << token % 8) & 0xFF


def _split(text: bytes) -> tuple[int, int, bool]:
    """Return (characters, bytes of `END` behind them, whether these are all of it)."""
    at, closed = text.find(END), END in text
    if not closed:
        at = text.rfind(END[:1])  # only the last byte of `END` equals the first
        at = at if at >= 0 and END.startswith(text[at:]) else len(text)
    characters = len(text[:at].translate(None, _CONTINUATIONS))
    return characters, len(END) if closed else len(text) - at, closed


def _fits(count: int, begun: int, bounds: tuple[int, int | None]) -> bool:
    """Return True if a value can still keep its bounds.

    Args:
        count: its characters.
        begun: bytes of `END` behind them. From the tag's last sign on they cannot belong to it.
    """
    least, most = bounds
    may_end = count >= least and (most is None or count <= most)
    may_go_on = begun < len(END) - 1 and (most is None or count + begun <= most)
    return may_end or may_go_on


def countable(node: Any) -> bool:
    """Return True if the calls in tags of a structural tag's format can be found in an answer.

    Each begins with a text of its own. It has a line break, and no JSON has one.
    """
    begins: list[str] = []
    texts: list[str] = []
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, Mapping):
            continue
        if node.get("type") in ("any_text", "regex", "grammar"):
            return False
        for name in ("begin", "end", "value", "separator"):
            value = node.get(name)
            texts += [entry for entry in (value if isinstance(value, list) else [value])
                      if isinstance(entry, str)]  # fmt: skip
        content = node.get("content")
        if isinstance(content, Mapping) and content.get("style") == "qwen_xml":
            begins.append(str(node.get("begin")))
        waiting += [value for name, value in node.items() if name != "json_schema"]
    everything = "\0".join(texts)
    return all("\n" in begin and everything.count(begin) == 1 for begin in begins)
