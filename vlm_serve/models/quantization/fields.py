"""Reads the fields of quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlm_serve.errors import CheckpointError


class Fields:
    """An object in quantization_config, or all of it.

    Args:
        content: of the file.
        place: for messages.

    Raises:
        CheckpointError: from every method; names the field.
    """

    def __init__(self, content: object, place: str = "quantization_config") -> None:
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{place} in config.json must be an object, not {content!r}")
        self.raw: Mapping[str, Any] = content
        self.place = place

    def number(self, name: str, *known: int) -> int:
        """Return a required whole number out of the supported ones."""
        value = self.raw.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value not in known:
            self._refuse(name, value, known)
        assert isinstance(value, int)
        return value

    def switch(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{name} in {self.place} must be true or false, not {value!r}")
        return value

    def expect(self, name: str, *known: object) -> None:
        """Refuse a value outside the supported ones, if the field is present."""
        value = self.raw.get(name)
        if value is not None and value not in known:
            self._refuse(name, value, known)

    def names(self, name: str) -> list[str]:
        """Return a list of names, empty if it is absent."""
        value = self.raw.get(name) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise CheckpointError(f"{name} in {self.place} must be a list of names, not {value!r}")
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """Return an object, empty if it is absent."""
        value = self.raw.get(name) or {}
        return Fields(value, f"{name} of {self.place}").raw

    def _refuse(self, name: str, value: object, known: tuple[object, ...]) -> None:
        named = " or ".join(repr(each) for each in known)
        raise CheckpointError(f"{name} {value!r} in {self.place} is not supported, only {named}")
