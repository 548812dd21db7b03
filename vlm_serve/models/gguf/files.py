"""Finds the files of a model in a folder or among those of a hub id: the parts of a split one, and
the vision tower beside it."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from vlm_serve.errors import CheckpointError, ConfigError, ModelNotFoundError
from vlm_serve.models.gguf.reader import GgufFile, Metadata
from vlm_serve.models.gguf.tensors import TOWER
from vlm_serve.models.gguf.text_config import architecture_of
from vlm_serve.models.gguf.vision import fitting_projectors, projector_of

SUFFIX = ".gguf"
NO_TOWER = "none"
_DEFAULT_KIND = "Q4_K_M"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_PREFERRED = ("bf16", "f16", "f32", "q8_0")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model: its parts in order, and its vision tower, if it has one. `blind`: a
    tower in the model's own file is left out."""

    parts: tuple[Path, ...]
    tower: Path | None
    blind: bool = False

    @property
    def every(self) -> tuple[Path, ...]:
        """Return all of them."""
        return self.parts if self.tower is None else (*self.parts, self.tower)


def _is_gguf(path: PurePath) -> bool:
    """Return True for a file with the name of a GGUF file."""
    return path.suffix.lower() == SUFFIX


def is_tower(path: PurePath) -> bool:
    """Return True for a file with the name of a vision tower."""
    return _is_gguf(path) and "mmproj" in path.name.lower()


def sole_model(folder: Path) -> Path | None:
    """Return the only model in a folder of GGUF files; None if there is no GGUF file.

    Raises:
        ModelNotFoundError: there are several.
    """
    firsts = _firsts(sorted(file for file in folder.iterdir() if _is_gguf(file)))
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts)
        raise ModelNotFoundError(f"{str(folder)!r} holds several models, name one: {names}")
    return firsts[0] if firsts else None


def _firsts(files: Sequence[Path]) -> list[Path]:
    """Return the first parts of all models."""
    parts = {file: _PART.fullmatch(file.name) for file in files if not is_tower(file)}
    return [file for file, part in parts.items() if part is None or int(part[2]) == 1]


def find_files(model: Path, tower: str | None) -> ModelFiles:
    """Return the files of a model.

    Args:
        model: its file, or any part of it.
        tower: the file of its vision tower, or "none"; None: one that lies beside it.

    Raises:
        CheckpointError: a part is missing, or a file is damaged.
        ConfigError: the named tower is no file.
    """
    parts = _parts(model)
    if tower == NO_TOWER:
        return ModelFiles(parts, None, blind=True)
    if tower is not None:
        if not Path(tower).is_file():
            raise ConfigError(f"mmproj {tower!r} is no file", param="mmproj")
        return ModelFiles(parts, Path(tower))
    return ModelFiles(parts, _tower_for(parts[0]))


def _parts(model: Path) -> tuple[Path, ...]:
    match = _PART.fullmatch(model.name)
    if match is None:
        return (model,)
    stem, count = match[1], int(match[3])
    parts = tuple(
        model.with_name(f"{stem}-{number:05}-of-{match[3]}{model.suffix}")
        for number in range(1, count + 1)
    )
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise CheckpointError(f"{model.name} is a part of a model whose {missing[0]} is missing")
    return parts


def check_parts(files: Sequence[GgufFile]) -> None:
    """Check that files are the parts of one model, in order.

    Raises:
        CheckpointError: they are not.
    """
    seen: dict[str, str] = {}
    for index, file in enumerate(files):
        split, name = Metadata(file.metadata, file.path.name, "split."), file.path.name
        count = split.count("count") or 1
        if count != len(files) or split.count("no") != index:
            raise CheckpointError(
                f"{name} is part {split.count('no') + 1} of {count} by its metadata: name the file "
                "of a split model as it was made"
            )
        for tensor in file.tensors:
            if tensor in seen:
                raise CheckpointError(f"{seen[tensor]} and {name} both hold {tensor[:80]!r}")
            seen[tensor] = name


def _tower_for(model: Path) -> Path | None:
    """Return the vision tower in the model's folder made from the same model, or the one
    that fits, if the folder holds no other model; None if there is none, or the model has one."""
    files = [file for file in sorted(model.parent.iterdir()) if _is_gguf(file)]
    towers = [file for file in files if is_tower(file)]
    if not towers:
        return None
    file = GgufFile(model)
    if any(tensor.startswith(TOWER) for tensor in file.tensors):
        return None
    metadata = Metadata(file.metadata, model.name)
    name, kind = architecture_of(metadata)
    if not kind.sees or metadata.count("split.no"):
        return None
    hidden = metadata.size(f"{name}.embedding_length")
    opened = {tower: Metadata(GgufFile(tower).metadata, tower.name) for tower in towers}
    known = fitting_projectors(kind.kind)
    fitting = [
        tower
        for tower, own in opened.items()
        if projector_of(own) in known and own.count("clip.vision.projection_dim") == hidden
    ]
    alike = [tower for tower in fitting if _basename(opened[tower]) == _basename(metadata)]
    alone = len(_firsts(files)) == 1
    chosen = alike or (fitting if alone else [])
    if not chosen:
        _log.warning("no mmproj beside %s is known to be its own: name it by --mmproj", model.name)
        return None
    nearest = min(chosen, key=lambda tower: (_rank(tower), tower.name.lower()))
    _log.info("the vision tower of %s is %s, which lies beside it", model.name, nearest.name)
    return nearest


def _basename(metadata: Metadata) -> str:
    return metadata.text("general.basename", "").lower()


def _rank(tower: PurePath) -> int:
    """Return the place of a tower's type among the preferred ones."""
    name = tower.name.lower()
    return next((i for i, part in enumerate(_PREFERRED) if part in name), len(_PREFERRED))


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
        if _is_gguf(path) and not is_tower(path):
            part = _PART.fullmatch(file)
            stem = part[1] if part else file[: -len(path.suffix)]
            models.setdefault(stem, []).append(file)
    if not models:
        raise ModelNotFoundError(f"{name!r} has neither safetensors nor GGUF files")
    if kind is None and len(models) == 1:
        return next(iter(models.values()))
    named = [stem for stem in models if _named(stem, kind or _DEFAULT_KIND)]
    if not named:
        known = ", ".join(PurePosixPath(stem).name for stem in models)
        raise ModelNotFoundError(
            f"{name!r} has no GGUF file of type {kind or _DEFAULT_KIND}; it has {known}"
        )
    return models[min(named, key=len)]


def choose_tower(files: Sequence[str]) -> list[str]:
    """Return the vision tower to take, as a list of one or none."""
    towers = [tower for tower in map(PurePosixPath, sorted(files)) if is_tower(tower)]
    return [str(min(towers, key=_rank))] if towers else []


def _named(stem: str, kind: str) -> bool:
    pattern = re.compile(rf"(^|[-._/]){re.escape(kind)}$", re.IGNORECASE)
    path = PurePosixPath(stem)
    return bool(pattern.search(path.name) or pattern.search(str(path.parent)))
