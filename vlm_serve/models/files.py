"""Locates a checkpoint's files: a directory, or a Hugging Face hub id."""

from __future__ import annotations

import json
import re
from pathlib import Path

from vlm_serve.errors import CheckpointError, ConfigError, ModelNotFoundError
from vlm_serve.foreign_files import foreign

INDEX_FILE = "model.safetensors.index.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
SIDECAR = "hf_quant_config.json"
"""ModelOpt's older exports have this file instead of a quantization_config."""
_CONFIG_FILES = ("config.json", "generation_config.json", SIDECAR)
_OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")


def resolve_checkpoint(
    model: str | Path, *, configs_only: bool = False, revision: str | None = None
) -> Path:
    """Return the local directory of a checkpoint; a hub id is downloaded, or found in the hub's
    cache.

    Args:
        model: directory or hub id.
        configs_only: download only the files that determine the model's size.
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelNotFoundError: neither a directory nor a hub id that can be fetched.
        ConfigError: a directory has no revisions.
    """
    path = Path(model)
    if path.is_dir():
        check_no_revision(revision)
        return path
    name = str(model)
    if path.is_file():
        what = foreign(path) or "is a file: name the folder of the checkpoint"
        raise ModelNotFoundError(f"{name!r} {what}")
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"{name!r} is neither a directory nor a Hugging Face hub id")
    # Imported late, because local checkpoints do not need it and it slows the start.
    from huggingface_hub import snapshot_download

    files = _CONFIG_FILES if configs_only else _HUB_FILES
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except Exception as error:
        raise ModelNotFoundError(f"{name!r} is no directory, and {_complaint(error)}") from error
    if "gguf" in name.lower() and not (configs_only or any(folder.glob("*.safetensors"))):
        raise ModelNotFoundError(
            f"{name!r} has GGUF files, which are not supported: take the one with safetensors"
        )
    return folder


def check_no_revision(revision: str | None) -> None:
    """Raise ConfigError if a revision is named of what has none."""
    if revision is not None:
        raise ConfigError(
            f"revision {revision!r} has no effect: the model is a folder, not a hub id",
            param="revision",
        )


def _complaint(error: Exception) -> str:
    """Translate an error of the hub's client, which raises errors of many libraries."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub gives that model to those only who have accepted its terms (HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has that model, but not this revision of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or a private one (HF_TOKEN)"
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return f"the hub answered with status {error.response.status_code}"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return f"it could not be fetched from the hub: {error.strerror}"
    return "the hub could not be reached; this machine has not fetched that model before"


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a checkpoint directory, in name order.

    Raises:
        CheckpointError: there are none, or the index is broken or names a missing file.
    """
    if (path / INDEX_FILE).is_file():
        names = _indexed(path / INDEX_FILE)
    elif (path / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"the checkpoint has no safetensors files{other_weights(path)}")
    for name in names:
        if not (path / name).is_file():
            raise CheckpointError(f"{INDEX_FILE} names {name}, which is missing")
    return tuple(path / name for name in names)


def other_weights(path: Path) -> str:
    """Return the end of a sentence that names weights of an unsupported kind; "" without any."""
    others = [file for end in _OTHER_WEIGHTS for file in sorted(path.glob(end))]
    return f"; {others[0].name} is of a kind that is not supported" if others else ""


def _indexed(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index.name} cannot be read") from error
    for name in names:
        if name != Path(name).name:
            raise CheckpointError(f"{index.name} names a file outside the checkpoint")
    return names
