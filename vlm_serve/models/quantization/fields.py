"""Reads the fields of quantization_config."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.quantization.passed_fields import PASSED_OVER, REFUSED

PLAIN = "serve the checkpoint that it was made from, with --quantization int8, int6 or int4"


class Fields:
    """An object in quantization_config, or all of it.

    It remembers the fields that were read; `finish` refuses the others.

    Args:
        content: of the file.
        place: for messages.

    Raises:
        CheckpointError: from every method; names the field.
    """

    def __init__(self, content: object, place: str = "quantization_config") -> None:
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{place} in config.json must be an object, not {content!r}")
        self._content: Mapping[str, Any] = content
        self._read: set[str] = set()
        self.place = place

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def get(self, name: str, default: object = None) -> Any:
        """Return a field's value, whatever it is."""
        self._read.add(name)
        return self._content.get(name, default)

    def number(self, name: str, *known: int) -> int:
        """Return a required whole number out of the supported ones."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value not in known:
            self._refuse(name, value, known)
        assert isinstance(value, int)
        return value

    def switch(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{name} in {self.place} must be true or false, not {value!r}")
        return value

    def expect(self, name: str, *known: object) -> None:
        """Refuse a value outside the supported ones, if the field is present."""
        value = self.get(name)
        if value is not None and value not in known:
            self._refuse(name, value, known)

    def names(self, name: str) -> list[str]:
        """Return a list of names, empty if it is absent."""
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise CheckpointError(f"{name} in {self.place} must be a list of names, not {value!r}")
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """Return an object whose keys are names of modules or groups, empty if it is absent."""
        return self.part(name)._content

    def part(self, name: str) -> Fields:
        """Return the fields of an object inside, none if it is absent."""
        return Fields(self.get(name) or {}, f"{name} of {self.place}")

    def changed(self, content: object, place: str) -> Fields:
        """Return the fields of some modules: these, with changes.

        Fields without a change need not be read before `finish`.
        """
        changes = Fields(content, place)._content
        result = Fields({**self._content, **changes}, place)
        result._read.update(
            name
            for name, value in self._content.items()
            if name not in changes or changes[name] == value
        )
        return result

    def agreed(self, *names: str) -> str:
        """Return the first present of several names of one field; the first if all are absent.

        Raises:
            CheckpointError: the field is present under two names with different values.
        """
        values = {name: self.get(name) for name in names}
        present = [name for name in names if values[name] is not None]
        for name in present[1:]:
            if str(values[name]).lower() != str(values[present[0]]).lower():
                raise CheckpointError(
                    f"{present[0]} {values[present[0]]!r} and {name} {values[name]!r} in "
                    f"{self.place} contradict each other"
                )
        return (present or [*names])[0]

    def finish(self, section: str) -> None:
        """Refuse unread fields.

        Those of PASSED_OVER may stay, and values asking for nothing: null, false, or empty.

        Args:
            section: a key of PASSED_OVER.
        """
        for name, value in self._content.items():
            nothing = value is None or value is False or value in ("", [], {})
            if not (nothing or name in self._read or name in PASSED_OVER[section]):
                reason = REFUSED.get(name, "it may change what the weights mean")
                raise CheckpointError(
                    f"{name} {reprlib.repr(value)} in {self.place} is not supported: {reason}; "
                    f"{PLAIN}"
                )

    def _refuse(self, name: str, value: object, known: tuple[object, ...]) -> None:
        named = " or ".join(repr(each) for each in known)
        raise CheckpointError(f"{name} {value!r} in {self.place} is not supported, only {named}")
