"""Reads values of a GGUF file one after the other, never beyond its end."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np

from vlm_serve.errors import CheckpointError

MOST_TEXT = 64 << 20
"""Bytes of all texts in the metadata of a file. Vocabularies of 250 000 tokens take 8 MiB."""
MOST_TEXTS = 1 << 21
MOST_NUMBERS = 1 << 22
"""Numbers in an array."""
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9

Value = int | float | bool | str | list[str] | np.ndarray[Any, Any]


class Cursor:
    """A place in the bytes of a file.

    Args:
        data: the file.
        name: of the file, for messages.

    Raises:
        CheckpointError: from every method: the file ends too early, or a size is absurd.
    """

    def __init__(self, data: mmap.mmap | bytes, name: str) -> None:
        self._data = memoryview(data)
        self._name = name
        self._texts = self._characters = 0
        self.at = 0

    @property
    def left(self) -> int:
        """Return the number of bytes from here to the end."""
        return len(self._data) - self.at

    def take(self, size: int, what: str) -> memoryview:
        """Return the next bytes."""
        if size > self.left:
            raise self.damaged(f"{what} reaches beyond its end")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, code: str, what: str) -> Any:
        """Return a number of a format of `struct`."""
        size = struct.calcsize("<" + code)
        if code == "?":
            return self.take(1, what)[0] != 0
        return struct.unpack("<" + code, self.take(size, what))[0]

    def text(self, what: str) -> str:
        """Return a text behind its length."""
        size = self.number("Q", what)
        self._texts += 1
        self._characters += size
        if self._characters > MOST_TEXT or self._texts > MOST_TEXTS:
            raise self.damaged(
                f"its metadata has more than {MOST_TEXTS} texts or {MOST_TEXT >> 20} MiB of them"
            )
        try:
            return str(self.take(size, what), "utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not UTF-8") from None

    def value(self, what: str) -> Value:
        """Return a value of the metadata behind its type."""
        kind = self.number("I", what)
        if kind == _TEXT:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _NUMBERS:
            raise self.damaged(f"{what} has the unknown type {kind}")
        value: int | float | bool = self.number(_NUMBERS[kind], what)
        return _shortest(value) if kind == 6 else value

    def _array(self, what: str) -> list[str] | np.ndarray[Any, Any]:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind == _TEXT:
            if count * 8 > self.left:
                raise self.damaged(f"{what} reaches beyond its end")
            return [self.text(what) for _ in range(count)]
        if kind not in _NUMBERS:
            raise self.damaged(f"{what} is an array of the unsupported type {kind}")
        if count > MOST_NUMBERS:
            raise self.damaged(f"{what} has more than {MOST_NUMBERS} numbers")
        dtype = np.dtype("<" + _NUMBERS[kind]) if kind != 7 else np.dtype("u1")
        found = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        return found != 0 if kind == 7 else found

    def damaged(self, how: str) -> CheckpointError:
        """Return the error of a damaged file; `how` is the rest of the sentence."""
        return CheckpointError(f"{self._name} is damaged: {how}")


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that is this float32: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(value)))
