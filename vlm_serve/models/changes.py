"""Changes to a config.json that options ask for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlm_serve.errors import ConfigError
from vlm_serve.models.config import ROTATIONS

_WHOLE = ("quantization_config", "compression_config")
"""Objects read as a whole."""
_OF_PROMPTS = (
    "eos_token_id",
    "text_config.eos_token_id",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""Fields that preparing prompts reads (`preprocess`)."""


@dataclass(frozen=True)
class Changes:
    """Fields that replace those of a config.json.

    Attributes:
        fields: of the whole file; those of nested objects are merged.
        rotation: of the language model's rotary positions, wherever the file has them.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    rotation: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of the file with the changes."""
        changed = _merged(raw, self.fields)
        if not self.rotation:
            return changed
        *outer, inner = self._rotation_place(changed)
        nested: Mapping[str, Any] = {inner: self.rotation}
        for name in reversed(outer):
            nested = {name: nested}
        return _merged(changed, nested)

    def check(self, raw: Mapping[str, Any], read: Collection[str]) -> None:
        """Check that a model's reader looks at every changed field.

        Args:
            raw: the content of the file with the changes.
            read: the paths that the reader has looked at. One with a dot at its end stands for all
                fields of an object.

        Raises:
            ConfigError: names a field that would have no effect, and its option.
        """
        known = {*read, *_OF_PROMPTS}
        whole = (*_WHOLE, *(path for path in read if path.endswith(".")))
        for path in _paths(self.fields):
            if path not in known and not path.startswith(whole):
                raise _unread("hf_overrides", path, raw, read)
        for name in self.rotation:
            if ".".join((*self._rotation_place(raw), name)) not in read:
                raise _unread("rope_scaling", name, {}, ())

    @staticmethod
    def _rotation_place(raw: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the nested objects that lead to the rotation."""
        text = raw.get("text_config")
        section = text if isinstance(text, Mapping) else raw
        older, newer = ROTATIONS
        name = newer if section.get(newer) and not section.get(older) else older
        return (name,) if section is raw else ("text_config", name)


def _merged(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(raw)
    for name, value in changes.items():
        before = merged.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = _merged(before, value)
        merged[name] = value
    return merged


def _paths(fields: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the path of every value that is no object."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{place}{name}.")
        else:
            yield place + name


def _unread(option: str, path: str, raw: Mapping[str, Any], read: Collection[str]) -> ConfigError:
    inner = f"text_config.{path}"
    nested = "text_config" in raw and inner in read
    hint = f"; {inner} would" if nested else ""
    return ConfigError(
        f"{option}: {path} has no effect, this model's reader does not look at it{hint}",
        param=option,
    )
