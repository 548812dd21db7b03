"""Reading config.json: fields as the file gives them, else as the family's table of defaults of
transformers' classes has them, or as the class itself works them out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from vlm_serve.errors import CheckpointError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_SECTIONS = {"text_config": "TextConfig", "vision_config": "VisionConfig"}
"""How transformers' classes of sections end, which begin like that of the whole."""

Defaults = Mapping[str, Mapping[str, Any]]


class Config:
    """A config.json or a section of it.

    What decides shapes or arithmetic is asked for by `size`, `number` and `given`. transformers
    saves files that leave such fields to its classes, so a default that the family's table names is
    taken and noted; loading compares what it implies with the tensors (`model_check.py`).

    Args:
        raw: the content.
        source: the name of transformers' configuration class, which an old version may not have:
            the table answers for that one alone.
        defaults: of the classes of a family, by the class's name, then by field. A function works a
            value out of the section that lacks it.
        class_of: returns a class by its name, None if there is none.
        place: what the section's fields begin with in `defaulted`.
        defaulted: the fields that the file left to a class, with the class's name; sections share
            it.

    Raises:
        CheckpointError: from every method; names the field.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        source: str,
        defaults: Defaults | None = None,
        *,
        class_of: Callable[[str], Any] = lambda source: None,
        place: str = "",
        defaulted: dict[str, str] | None = None,
    ) -> None:
        self.raw = raw
        self.defaulted = {} if defaulted is None else defaulted
        self._source = source
        self._class_of = class_of
        self._defaults = {} if defaults is None else defaults
        self._place = place

    @cached_property
    def _kind(self) -> Any:
        return self._class_of(self._source)

    @cached_property
    def _parsed(self) -> Any:
        try:
            return self._kind.from_dict(deepcopy(dict(self.raw)))
        except Exception as error:  # of many types
            raise CheckpointError(f"config.json: {' '.join(str(error).split())}") from error

    def given(self, name: str) -> Any:
        """Return a field of the file, also under another name that means the same, or its default.

        Raises CheckpointError if neither the file nor the family's table has it.
        """
        pairs = getattr(self._kind, "attribute_map", {}).items()
        aliases = [other for pair in pairs if name in pair for other in pair]
        for each in (name, *aliases):
            if self.raw.get(each) is not None:
                return self.raw[each]
        if name not in (known := self._defaults.get(self._source, {})):
            raise CheckpointError(f"config.json lacks {name}")
        self.defaulted[self._place + name] = self._source
        if name in self.raw and self._kind:  # null, which a class may read in a way of its own
            return self.value(name)
        return known[name](self) if callable(known[name]) else known[name]

    def size(self, name: str) -> int:
        """A positive whole number; see `given`."""
        value = self.given(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{name} in config.json must be a positive integer, not {value!r}"
            )
        return value

    def number(self, name: str) -> float:
        """A number; see `given`."""
        value = self.given(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{name} in config.json must be a number, not {value!r}")
        return float(value)

    def positive(self, name: str) -> float:
        """A finite number above 0; see `given`."""
        value = self.number(name)
        if not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{name} in config.json must be positive, not {value!r}")
        return value

    def value(self, name: str) -> Any:
        """A field as transformers has it; see `given` for a class that it does not have yet."""
        if self._kind is None:
            return self.given(name)
        try:
            return getattr(self._parsed, name)
        except AttributeError as error:
            raise CheckpointError(
                f"config.json lacks {name}, and transformers {version('transformers')} knows no "
                f"default; a newer one may"
            ) from error

    def expect(self, name: str, expected: object) -> None:
        """Refuses a model in which a field, see `given`, has another value."""
        value = self.given(name)
        if value != expected:
            raise CheckpointError(f"{name} {value!r} is not supported, only {expected!r}")

    def allow(self, name: str, *values: object) -> None:
        """Refuses a model in which a field has another value than these, if the file has it."""
        value = self.raw.get(name)
        if value is not None and value not in values:
            named = f", only {values[0]!r}" if values[0] is not None else ""
            raise CheckpointError(f"{name} {value!r} is not supported{named}")

    def section(self, name: str, source: str = "") -> Config:
        """A part that is an object of its own; `source`: its class, if it is not the whole's."""
        value = self.given(name)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{name} in config.json must be an object")
        own = self._source.removesuffix("Config") + _SECTIONS[name]
        return self._like(value, source or own, f"{self._place}{name}.")

    def _like(self, raw: Mapping[str, Any], source: str, place: str) -> Config:
        return Config(
            raw,
            source,
            self._defaults,
            class_of=self._class_of,
            place=place,
            defaulted=self.defaulted,
        )

    def inlined(self, *names: str) -> Config:
        """The same, with the fields of the first of these objects that the file has, if any."""
        given: Any = next((self.raw[name] for name in names if self.raw.get(name)), {})
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{names[0]} in config.json must be an object")
        return self._like({**self.raw, **given}, self._source, self._place)

    def dtype(self, *sections: Config) -> torch.dtype:
        """Of the weights, which sections may name as well; bfloat16 if nobody does."""
        for each in (self, *sections):
            for name in ("dtype", "torch_dtype"):
                value = each.raw.get(name)
                if value is not None:
                    if not isinstance(value, str) or value not in _DTYPES:
                        raise CheckpointError(f"{name} {value!r} is not supported")
                    return _DTYPES[value]
        return torch.bfloat16


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, which names no folder."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read as JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must hold a JSON object")
    return value
