"""Chooses among the GGUF files of a hub id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from vlm_serve.errors import ModelNotFoundError

DEFAULT_KIND = "Q4_K_M"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_TOWERS = ("bf16", "f16", "f32", "q8_0")


def choose(name: str, files: Sequence[str], kind: str | None) -> list[str]:
    """Return the parts of the model to take, in order.

    Args:
        name: hub id, for messages.
        files: all its files.
        kind: the end of a file's or folder's name, such as Q4_K_M; None: that, or the only one.

    Raises:
        ModelNotFoundError: there is no such model; names those that there are.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix.lower() == ".gguf" and not _is_tower(path):
            models.setdefault(_PART.sub("", file[: -len(path.suffix)]), []).append(file)
    if not models:
        raise ModelNotFoundError(f"{name!r} has neither safetensors nor GGUF files")
    if kind is None and len(models) == 1:
        return next(iter(models.values()))
    found = [stem for stem in models if _named(stem, kind or DEFAULT_KIND)]
    if not found:
        known = ", ".join(PurePosixPath(stem).name for stem in models)
        raise ModelNotFoundError(
            f"{name!r} has no GGUF file of type {kind or DEFAULT_KIND}; it has {known}"
        )
    return models[min(found, key=len)]


def choose_tower(files: Sequence[str]) -> list[str]:
    """Return the vision tower to take, as a list of one or none."""
    towers = [each for each in sorted(files) if _is_tower(PurePosixPath(each))]

    def rank(file: str) -> int:
        name = PurePosixPath(file).name.lower()
        return next((place for place, each in enumerate(_TOWERS) if each in name), len(_TOWERS))

    return [min(towers, key=rank)] if towers else []


def _is_tower(path: PurePosixPath) -> bool:
    return path.suffix.lower() == ".gguf" and "mmproj" in path.name.lower()


def _named(stem: str, kind: str) -> bool:
    pattern = re.compile(rf"(^|[-._/]){re.escape(kind)}$", re.IGNORECASE)
    path = PurePosixPath(stem)
    return bool(pattern.search(path.name) or pattern.search(str(path.parent)))
