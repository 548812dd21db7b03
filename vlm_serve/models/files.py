"""A checkpoint's files: a directory, or a Hugging Face hub id; and their tensors."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from vlm_serve.errors import CheckpointError, ConfigError, ModelNotFoundError
from vlm_serve.models.gguf.files import (
    NO_TOWER,
    choose,
    choose_tower,
    find_files,
    sole_model,
)
from vlm_serve.models.gguf.folder import POINTER, folder_of, gguf_files, open_tensors
from vlm_serve.models.gguf.stores import stored_files
from vlm_serve.system.foreign_files import foreign, is_gguf

_log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
_HUB_ID = re.compile(r"(\w[\w.-]*/[\w.-]+)(?::([\w.-]+))?", re.ASCII)
SIDECAR = "hf_quant_config.json"
"""ModelOpt's older exports have this file instead of a quantization_config."""
_CONFIG_FILES = ("config.json", "generation_config.json", SIDECAR)
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_ADAPTER = "adapter_config.json"
_ADAPTER_FILES = (_ADAPTER, "adapter_model.safetensors", "tokenizer.json", "*.jinja")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")


def resolve_checkpoint(
    model: str | Path,
    *,
    configs_only: bool = False,
    revision: str | None = None,
    tower: str | None = None,
) -> Path:
    """Return the local directory of a checkpoint; a hub id is downloaded, or found in the hub's
    cache. GGUF files get a directory that points to them.

    Args:
        model: directory, GGUF file, hub id, or "ollama:" or "lmstudio:" and a name there. Behind a
            hub id and a colon, the type of a GGUF file.
        configs_only: download only the files that determine the model's size.
        revision: branch, tag or commit of a hub id.
        tower: GGUF file of the vision tower, or "none"; None: one beside the model's file.

    Raises:
        ModelNotFoundError: neither a directory nor a hub id that can be fetched.
        CheckpointError: a GGUF file is damaged, incomplete or of an unsupported kind.
        ConfigError: a directory has no revisions, or the model has no use for a tower.
    """
    path, name = Path(model), str(model)
    if path.is_dir() or path.is_file():
        check_no_revision(revision)
        return _local(path, tower)
    stored = stored_files(name, tower)
    if stored is not None:
        check_no_revision(revision)
        return folder_of(stored)
    match = _HUB_ID.fullmatch(name)
    if match is None:
        raise ModelNotFoundError(
            f"{name!r} is neither a directory nor a Hugging Face hub id, nor built in as demo and "
            "demo-moe are"
        )
    if match[2] is None:
        files = _CONFIG_FILES if configs_only else _HUB_FILES
        folder = _fetched(name, revision, files)
        if not _has_gguf(folder, name, configs_only=configs_only):
            check_no_tower(tower)
            return folder
    return _from_hub(match[1], match[2], revision, tower, configs_only=configs_only)


def _local(path: Path, tower: str | None) -> Path:
    """Return the directory of local files."""
    model: Path | None = path
    if path.is_dir():
        model = None if _is_checkpoint(path) else sole_model(path)
    elif not is_gguf(path):
        problem = foreign(path) or "is a file: name the folder of the checkpoint"
        raise ModelNotFoundError(f"{str(path)!r} {problem}")
    if model is None:
        check_no_tower(tower)
        return path
    return folder_of(find_files(model, tower))


def _is_checkpoint(folder: Path) -> bool:
    return (folder / POINTER).is_file() or any(folder.glob("*.safetensors"))


def _fetched(
    name: str, revision: str | None, patterns: Sequence[str], *, downloaded: bool = False
) -> Path:
    """Return the folder of some files of a hub id; `downloaded`: only of those that are here."""
    # Imported late, because local checkpoints do not need it and it slows the start.
    from huggingface_hub import snapshot_download

    if not downloaded:
        _log.info("fetching the files of %s from the hub that are not here yet", name)
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), local_files_only=downloaded
            )
        )
    except Exception as error:
        raise ModelNotFoundError(f"{name!r} is no directory, and {_complaint(error)}") from error


def fetched_adapter(name: str) -> Path:
    """Return the local folder of a hub id's adapter.

    Raises:
        ModelNotFoundError: it is no hub id, or cannot be fetched.
    """
    if _HUB_ID.fullmatch(name) is None:
        raise ModelNotFoundError(f"{name!r} is neither a directory nor a Hugging Face hub id")
    return _fetched(name, None, _ADAPTER_FILES)


def _has_gguf(folder: Path, name: str, *, configs_only: bool) -> bool:
    """Return True for a hub id whose weights are GGUF files, going by its name and its files."""
    if "gguf" not in name.lower() and not any(folder.rglob("*.gguf")):
        return False
    return configs_only or not any(folder.glob("*.safetensors"))


def _from_hub(
    name: str, kind: str | None, revision: str | None, tower: str | None, *, configs_only: bool
) -> Path:
    """Return the directory of a hub id's GGUF files."""
    listed = _listed(name, revision)
    chosen = choose(name, listed, kind)
    towers = [] if tower is not None else choose_tower(listed)
    try:
        folder = _fetched(name, revision, [*chosen, *towers], downloaded=configs_only)
        here = all((folder / file).is_file() for file in chosen)
    except ModelNotFoundError:
        if not configs_only:
            raise
        here = False
    if not here:
        raise ModelNotFoundError(f"{chosen[0]} of {name!r} is not downloaded yet: serve it once")
    tower_path = str(folder / towers[0]) if towers and (folder / towers[0]).is_file() else NO_TOWER
    return folder_of(find_files(folder / chosen[0], tower_path if tower is None else tower))


def _listed(name: str, revision: str | None) -> list[str]:
    """Return the names of a hub id's files, or without the hub those that are here."""
    from huggingface_hub import HfApi

    try:
        return list(HfApi().list_repo_files(name, revision=revision))
    except Exception as error:
        try:
            folder = _fetched(name, revision, ["*.gguf"], downloaded=True)
        except ModelNotFoundError:
            problem = f"{name!r} is no directory, and {_complaint(error)}"
            raise ModelNotFoundError(problem) from error
        return [str(file.relative_to(folder)) for file in sorted(folder.rglob("*.gguf"))]


def check_no_revision(revision: str | None) -> None:
    """Raise ConfigError if a revision is named of what has none."""
    if revision is not None:
        raise ConfigError(
            f"revision {revision!r} has no effect: the model is a folder, not a hub id",
            param="revision",
        )


def check_no_tower(tower: str | None) -> None:
    """Raise ConfigError if a vision tower is named for what is no GGUF file."""
    if tower is not None:
        raise ConfigError(
            f"mmproj {tower!r} has no effect: the model is no GGUF file", param="mmproj"
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
    """Return the files with the weights of a checkpoint directory: safetensors in name order, or
    the GGUF files that it points to.

    Raises:
        CheckpointError: there are none, or the index is broken or names a missing file.
    """
    pointed = gguf_files(path)
    if pointed is not None:
        return pointed.every
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
    if (path / _ADAPTER).is_file():
        return f"; {_ADAPTER} says that this is an adapter: merge it into its model and save that"
    others = [file for end in _OTHER_WEIGHTS for file in sorted(path.glob(end))]
    return f"; {others[0].name} is of a kind that is not supported" if others else ""


def _indexed(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index.name} cannot be read") from error
    for name in names:
        if name != Path(name).name:
            raise CheckpointError(f"{index.name} names a file outside the checkpoint")
    return names


class TensorFile(Protocol):
    """Tensors by their names. They are read when they are asked for.

    Attributes:
        nbytes: size of the file.
    """

    nbytes: int

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        ...

    def source(self, name: str) -> str:
        """Return what the file itself calls a tensor; several names may stand for one."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as stored, which must not be written to."""
        ...


class TensorsInMemory:
    """Tensors on the CPU by their names in a checkpoint's files."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {_current(name): tensor for name, tensor in tensors.items()}
        self._stored = {_current(name): name for name in tensors}
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._tensors

    def source(self, name: str) -> str:
        """Return the name by which it was given."""
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as it was given."""
        return self._tensors[name]


_PLAIN = {f"to_{part}": f"{part}_proj" for part in "qkv"} | {
    "to_out": "o_proj",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}
_DIFFUSERS = re.compile(rf"\.self_attn\.({'|'.join(_PLAIN)})\.")
"""Names of attention in checkpoints of Cosmos3 that also generate pictures."""
_OLDER = {
    r"^(backbone|model)\.embeddings\.weight$": r"\1.embed_tokens.weight",
    r"\.block_sparse_moe\.input_linear\.weight$": ".block_sparse_moe.experts.gate_up_proj",
    r"\.block_sparse_moe\.output_linear\.weight$": ".block_sparse_moe.experts.down_proj",
    r"\.block_sparse_moe\.router\.layer\.weight$": ".block_sparse_moe.router.weight",
}
"""Names in published files of Nemotron-H and Granite, and those of transformers' classes."""


class SafetensorsFile:
    """A file of safetensors, mapped into memory.

    Attributes:
        stored: the names in the file.

    Raises:
        CheckpointError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._handle: safe_open = safe_open(path, framework="pt")
            self.stored: Sequence[str] = self._handle.keys()  # type: ignore[no-untyped-call]
            self._stored: dict[str, str] = {_current(name): name for name in self.stored}
            self.nbytes = path.stat().st_size
        except (OSError, SafetensorError) as error:
            problem = foreign(path) or "is not a readable safetensors file"
            raise CheckpointError(f"{path.name} {problem}") from error

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._stored

    def source(self, name: str) -> str:
        """Return the name by which the file has a tensor."""
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        part = self._handle.get_slice(self._stored[name])  # type: ignore[no-untyped-call]
        return tuple(part.get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as stored."""
        return self.tensor_as(self._stored[name])

    def tensor_as(self, name: str) -> torch.Tensor:
        """Return the tensor of that name in the file."""
        tensor: torch.Tensor = self._handle.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor


def copied_tensors(path: Path, check_room: Callable[[int], None]) -> dict[str, torch.Tensor]:
    """Return copies of a file's tensors by their names. Whoever writes the file may cut it short
    meanwhile, which would end a process that had mapped it.

    Args:
        path: a file of safetensors.
        check_room: is called with the bytes of memory that this takes for a moment.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            check_room(2 * os.fstat(file.fileno()).st_size)
            tensors: dict[str, torch.Tensor] = load(file.read())
            return tensors
    except (OSError, SafetensorError, KeyError) as error:  # KeyError: a type that torch lacks
        raise CheckpointError(f"{path.name} is not a readable safetensors file") from error


def _current(name: str) -> str:
    """Return a tensor's name in transformers' classes."""
    for pattern, plain in _OLDER.items():
        name = re.sub(pattern, plain, name)
    return _DIFFUSERS.sub(_plain, name)


def _plain(match: re.Match[str]) -> str:
    return f".self_attn.{_PLAIN[match[1]]}."


def open_files(path: Path) -> list[TensorFile]:
    """Return the files of a checkpoint's folder, or those that it points to.

    Raises:
        CheckpointError: one is missing or broken.
    """
    files = gguf_files(path)
    if files is not None:
        return [open_tensors(files)]
    return [SafetensorsFile(file) for file in weight_files(path)]
