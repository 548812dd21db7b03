"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.reader import Value


class Metadata:
    """The values of a file by their keys.

    Args:
        values: as read.
        name: of the file, for messages.
        prefix: of keys that `own` names.

    Raises:
        CheckpointError: from every method; names the key.
    """

    def __init__(self, values: Mapping[str, Value], name: str, prefix: str = "") -> None:
        self._values = values
        self.name = name
        self._prefix = prefix

    def own(self, prefix: str) -> Metadata:
        """Return the same values, by keys behind a prefix."""
        return Metadata(self._values, self.name, prefix)

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._values

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number. Arrays of one number for every layer count as one."""
        value = self._required(key, default)
        if isinstance(value, np.ndarray):
            distinct = {int(each) for each in value if each} if value.dtype.kind in "iu" else set()
            value = distinct.pop() if len(distinct) == 1 else value.tolist()
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self._wrong(key, "a positive integer", value)
        return value

    def count(self, key: str) -> int:
        """Return a whole number that may be 0, as it is without the key."""
        value = self._values.get(self._prefix + key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self._wrong(key, "a number of things", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._required(key, default)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not math.isfinite(float(value)):
            raise self._wrong(key, "a number", value)
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def texts(self, key: str) -> list[str]:
        """Return an array of texts."""
        value = self._required(key, None)
        if not isinstance(value, list):
            raise self._wrong(key, "an array of texts", value)
        return value

    def numbers(self, key: str) -> list[Any] | None:
        """Return an array of numbers or flags; None without the key."""
        value = self._values.get(self._prefix + key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray):
            raise self._wrong(key, "an array of numbers", value)
        return list(value.tolist())

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a flag."""
        value = self._values.get(self._prefix + key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def expect(self, key: str, *known: Value) -> None:
        """Refuse a value outside of the supported ones, if the key is there."""
        value = self._values.get(self._prefix + key)
        if value is not None and (isinstance(value, np.ndarray) or value not in known):
            raise CheckpointError(
                f"{self._prefix}{key} {_short(value)} in {self.name} is not supported, only "
                f"{' or '.join(map(repr, known))}"
            )

    def _required(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key, default)
        if value is None:
            raise CheckpointError(f"{self.name} lacks {self._prefix}{key}")
        return value

    def _wrong(self, key: str, wanted: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"{self._prefix}{key} in {self.name} must be {wanted}, not {_short(value)}"
        )


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, np.ndarray | list) else f"{len(value)} values"
    return text if len(text) <= 80 else f"{text[:77]}..."
