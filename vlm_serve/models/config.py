"""Reading config.json: sizes as the file itself gives them, everything else as transformers'
configuration class of the model has it, with its defaults and renames."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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


class Config:
    """A config.json or a section of it.

    What decides shapes or arithmetic is asked for by `size`, `number` and `given`, which the file
    must answer: a default of transformers would fill it in without a word.

    Args:
        raw: the content.
        kind: transformers' configuration class.
        classes: all of them, by model type.

    Raises:
        CheckpointError: from every method; names the field.
    """

    def __init__(
        self, raw: Mapping[str, Any], kind: Any, classes: Mapping[str, Any] | None = None
    ) -> None:
        self.raw = raw
        self._kind = kind
        self._classes = {} if classes is None else classes

    @cached_property
    def _parsed(self) -> Any:
        try:
            return self._kind.from_dict(deepcopy(dict(self.raw)))
        except Exception as error:  # of many types
            raise CheckpointError(f"config.json: {' '.join(str(error).split())}") from error

    def given(self, name: str) -> Any:
        """A field that the file must have, under this name or another one that means the same."""
        pairs = self._kind.attribute_map.items()
        aliases = [other for pair in pairs if name in pair for other in pair]
        for each in (name, *aliases):
            if self.raw.get(each) is not None:
                return self.raw[each]
        raise CheckpointError(f"config.json lacks {name}")

    def size(self, name: str) -> int:
        """A positive whole number that the file must have."""
        value = self.given(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{name} in config.json must be a positive integer, not {value!r}"
            )
        return value

    def number(self, name: str) -> float:
        """A number that the file must have."""
        value = self.given(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{name} in config.json must be a number, not {value!r}")
        return float(value)

    def positive(self, name: str) -> float:
        """A finite number above 0 that the file must have."""
        value = self.number(name)
        if not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{name} in config.json must be positive, not {value!r}")
        return value

    def value(self, name: str) -> Any:
        """A field as transformers has it, which an old version of it may not."""
        try:
            return getattr(self._parsed, name)
        except AttributeError as error:
            raise CheckpointError(
                f"config.json lacks {name}, and transformers {version('transformers')} knows no "
                f"default; a newer one may"
            ) from error

    def expect(self, name: str, expected: object) -> None:
        """Refuses a model in which a field, which the file must have, has another value."""
        value = self.given(name)
        if value != expected:
            raise CheckpointError(f"{name} {value!r} is not supported, only {expected!r}")

    def allow(self, name: str, *values: object) -> None:
        """Refuses a model in which a field has another value than these, if the file has it."""
        value = self.raw.get(name)
        if value is not None and value not in values:
            named = f", only {values[0]!r}" if values[0] is not None else ""
            raise CheckpointError(f"{name} {value!r} is not supported{named}")

    def section(self, name: str, kind: str | None = None) -> Config:
        """A part that is an object of its own; `kind`: its model type, where there are several."""
        value = self.given(name)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{name} in config.json must be an object")
        named = self._classes[kind] if kind else self._kind.sub_configs.get(name, self._kind)
        return Config(value, named, self._classes)

    def inlined(self, *names: str) -> Config:
        """The same, with the fields of the first of these objects that the file has."""
        given = next((self.raw[name] for name in names if self.raw.get(name)), None)
        if not isinstance(given, Mapping):
            raise CheckpointError(f"config.json lacks {names[0]}")
        return Config({**self.raw, **given}, self._kind, self._classes)

    def dtype(self, *sections: Config) -> torch.dtype:
        """Of the weights, which sections may name as well; bfloat16 if nobody does."""
        for each in (self, *sections):
            for name in ("dtype", "torch_dtype"):
                value = each.raw.get(name)
                if value is not None:
                    if value not in _DTYPES:
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
