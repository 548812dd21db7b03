"""The identity of weights: a digest of each tensor, and all of them combined in the order of names.

It is their content, not the checkpoint's name, so that fine-tunes share no cache entry. However a
checkpoint is cut into files, and whether a tensor came from a file or from memory, makes no
difference.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from vlm_serve.errors import CheckpointError
from vlm_serve.models.files import SIDECAR, SafetensorsFile, weight_files
from vlm_serve.models.gguf.folder import gguf_files
from vlm_serve.system.private_files import cache_path, make_private, open_private, secure_cache

_DOMAIN = b"vlm-serve weights 2"
_MEMORY_FILE = "tensor-digests.json"
_MOST_REMEMBERED = 1 << 17
"""Digests of tensors; one takes 64 bytes in the file."""
# A file modified within this many seconds before hashing could change again without a new mtime.
_SETTLED_SECONDS = 2.0
# Fields of config.json that name its writer and do not affect the computation.
_IDLE_FIELDS = ("transformers_version", "_name_or_path")
_LARGE = 1 << 20
"""Bytes of a tensor from which several threads hash faster than one."""
_Entry = tuple[int, int, str]
"""(size, mtime in ns, hexadecimal digests one behind the other, in the order of their names)."""

Digests = dict[str, bytes]
"""Digests of tensors, 32 bytes each, by their names in the checkpoint."""


class Origin(NamedTuple):
    """What a model's weights were read from.

    Attributes:
        path: folder of a checkpoint.
        tensors: in the place of those in its files, by their names there.
        digests: of all of them.
    """

    path: Path = Path()
    tensors: Mapping[str, torch.Tensor] = {}
    digests: Digests = {}


def tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """Return the 32-byte digest of a tensor on the CPU: of its name, dtype, shape and content."""
    head = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    hasher = blake3(max_threads=blake3.AUTO if content.nbytes >= _LARGE else 1)
    hasher.update(len(head).to_bytes(8, "little") + head)
    return hasher.update(content.data).digest()


def digests_of(path: Path | str) -> Digests:
    """Return the digests of all tensors of a checkpoint. A GGUF file counts as one tensor.

    Those of a file are remembered by path, size and modification time in the user's cache directory
    (`$XDG_CACHE_HOME/vlm-serve`). If that is unwritable, or another user could have written it,
    files are hashed at every start.

    Raises:
        CheckpointError: a file is missing or unreadable.
    """
    path = Path(path)
    remembered, fresh = _recall(), dict[str, _Entry]()
    whole, digests = gguf_files(path) is not None, Digests()
    for index, file in enumerate(weight_files(path)):
        key = str(file.resolve())
        opened = None if whole else SafetensorsFile(file)
        names = [f"file {index}"] if opened is None else sorted(opened.stored)
        try:
            status = os.stat(key)
            known = remembered.get(key)
            entry = status.st_size, status.st_mtime_ns
            if known is None or known[:2] != entry or len(known[2]) != 64 * len(names):
                known = (*entry, b"".join(_hashed(key, opened)).hex())
                if time.time() - status.st_mtime > _SETTLED_SECONDS:
                    fresh[key] = known
        except OSError as error:
            raise CheckpointError(f"{file.name} cannot be read") from error
        values = bytes.fromhex(known[2])
        starts = range(0, len(values), 32)
        digests.update(zip(names, (values[at : at + 32] for at in starts), strict=True))
    if fresh:
        _remember(fresh)
    return digests


def _hashed(path: str, opened: SafetensorsFile | None) -> Iterator[bytes]:
    """Yield the digests of a file's tensors, or of a file whose tensors are not known."""
    if opened is None:
        yield blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
        return
    for name in sorted(opened.stored):
        yield tensor_digest(name, opened.tensor_as(name))


def fingerprint(
    path: Path | str,
    config: Mapping[str, Any] | None = None,
    digests: Digests | None = None,
    only: Collection[str] | None = None,
) -> bytes:
    """Return a 32-byte BLAKE3 over config.json, ModelOpt's file beside it, and the tensors.

    Args:
        path: directory of the checkpoint.
        config: what counts as the content of config.json, which options may have changed; None: the
            file's.
        digests: of the tensors; None: of those in the files.
        only: names of the tensors that count. All count if one of them is not known, since it is
            part of a file without names; None: all.

    Raises:
        CheckpointError: a file is missing or unreadable.
    """
    path = Path(path)
    digests = digests_of(path) if digests is None else digests
    names: Iterable[str] = digests
    if only is not None and digests.keys() >= set(only):
        names = only
    combined = b"".join(digests[name] for name in sorted(names))
    return blake3(_DOMAIN + config_digest(path, config) + combined).digest()


def config_digest(path: Path, config: Any = None) -> bytes:
    """Return a digest of the config and of ModelOpt's file beside it; None: of config.json."""
    try:
        if config is None:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError("config.json cannot be read as JSON") from error
    if isinstance(config, dict):
        config = {name: value for name, value in config.items() if name not in _IDLE_FIELDS}
    digest = blake3(json.dumps(config, sort_keys=True).encode())
    with contextlib.suppress(FileNotFoundError):
        digest.update((path / SIDECAR).read_bytes())
    return digest.digest()


def _recall() -> dict[str, _Entry]:
    folder = cache_path()
    if folder is None:
        return {}
    try:
        secure_cache(folder)
        with open(open_private(folder / _MEMORY_FILE), encoding="utf-8") as file:
            content = json.load(file)
        return {
            str(key): (int(size), int(mtime), bytes.fromhex(digest).hex())
            for key, (size, mtime, digest) in content.items()
            if len(digest) % 64 == 0
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        # Unreadable, damaged or another user's: treat it as empty; the next write replaces it.
        return {}


def _remember(fresh: dict[str, _Entry]) -> None:
    """Merge into the file and replace it whole, so that readers never see half of it."""
    folder = cache_path()
    if folder is None:
        return
    merged = _recall() | fresh
    kept, left = dict[str, _Entry](), _MOST_REMEMBERED
    for key, entry in reversed(merged.items()):
        left -= len(entry[2]) // 64
        if left < 0:
            break
        kept[key] = entry
    kept = dict(reversed(kept.items()))
    try:
        secure_cache(folder)
        make_private(folder)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as file:
            json.dump(kept, file)
        os.replace(file.name, folder / _MEMORY_FILE)
    except OSError:
        return
