"""Models that Ollama and LM Studio have downloaded, by their names there: `ollama:NAME[:TAG]` as
`ollama list` shows it, `lmstudio:PUBLISHER/REPO[:KIND]` with a type as behind a hub id."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from vlm_serve.errors import CheckpointError, ModelNotFoundError
from vlm_serve.models.gguf.files import ModelFiles, choose, find_files

_OWN = ("registry.ollama.ai", "library")
"""Host and namespace of names that have none."""
_NAME = re.compile(r"((?:[\w-][\w.-]*/){0,2}[\w-][\w.-]*)(?::([\w-][\w.-]*))?")
_OWN_PARTS = re.compile(r"^registry\.ollama\.ai/(library/)?")
_KIND = "application/vnd.ollama.image."
_SERVICE = "/usr/share/ollama/.ollama/models"


def stored_files(name: str, tower: str | None) -> ModelFiles | None:
    """Return the files of "ollama:" or "lmstudio:" and a name there; None: it is no such name.
    `tower` is as for `find_files`.

    Raises:
        ModelNotFoundError, CheckpointError: there is no such model, or not all of it.
    """
    program, _, rest = name.partition(":")
    match = _NAME.fullmatch(rest)
    if match is None or program not in ("ollama", "lmstudio"):
        return None
    finder = _of_ollama if program == "ollama" else _of_lm_studio
    return finder(match[1], match[2], tower)


def _of_ollama(name: str, tag: str | None, tower: str | None) -> ModelFiles:
    given = os.environ.get("OLLAMA_MODELS")
    roots = [Path(given)] if given else [Path.home() / ".ollama/models", Path(_SERVICE)]
    parts = name.split("/")
    place = Path("manifests", *_OWN[: 3 - len(parts)], *parts, tag or "latest")
    root = next((each for each in roots if (each / place).is_file()), None)
    if root is None:
        there = [path.parts[-4:] for each in roots for path in each.glob("manifests/*/*/*/*")]
        names = [_OWN_PARTS.sub("", "/".join(path[:3])) + f":{path[3]}" for path in there]
        raise _missing("Ollama", f"{name}:{place.name}", roots, names)
    try:
        layers = json.loads((root / place).read_text(encoding="utf-8"))["layers"]
        digests = {layer["mediaType"]: str(layer["digest"]) for layer in layers}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"Ollama's manifest of {name} cannot be read") from error
    kinds = (digests.get(_KIND + kind, "none") for kind in ("model", "projector"))
    model, own = (root / "blobs" / digest.replace(":", "-") for digest in kinds)
    if not model.is_file():
        raise CheckpointError(f"Ollama's model {name} is not complete: pull it again")
    return find_files(model, str(own) if tower is None and own.is_file() else tower)


def _of_lm_studio(name: str, kind: str | None, tower: str | None) -> ModelFiles:
    roots = [Path.home() / place / "models" for place in (".lmstudio", ".cache/lm-studio")]
    folder = next((root / name for root in roots if (root / name).is_dir()), None)
    if folder is None or "/" not in name:
        files = [path for root in roots for path in root.glob("*/*/*.gguf")]
        raise _missing("LM Studio", name, roots, ["/".join(file.parts[-3:-1]) for file in files])
    chosen = choose(name, [file.name for file in folder.iterdir()], kind)
    return find_files(folder / chosen[0], tower)


def _missing(program: str, name: str, roots: list[Path], there: list[str]) -> ModelNotFoundError:
    known = ", ".join(sorted(set(there))) or "none at all"
    places = " and ".join(map(str, roots))
    return ModelNotFoundError(f"{program} has no model {name!r} in {places}; it has {known}")
