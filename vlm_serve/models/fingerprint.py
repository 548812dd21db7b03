"""A checkpoint's identity: its content, not its name, so that fine-tunes share no cache entry."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from vlm_serve.errors import CheckpointError
from vlm_serve.models.files import SIDECAR, weight_files
from vlm_serve.system.private_files import cache_path, make_private, open_private, secure_cache

_DOMAIN = b"vlm-serve weights 1"
_MEMORY_FILE = "fingerprints.json"
_MOST_REMEMBERED = 4096
# A file modified within this many seconds before hashing could change again without a new mtime.
_SETTLED_SECONDS = 2.0
# Fields of config.json that name its writer and do not affect the computation.
_IDLE_FIELDS = ("transformers_version", "_name_or_path")

_Entry = tuple[int, int, str]
"""(size, mtime in ns, hexadecimal digest)."""


def fingerprint(path: Path | str, config: Mapping[str, Any] | None = None) -> bytes:
    """Return a 32-byte BLAKE3 over config.json, ModelOpt's file beside it, and every weight file.

    Without `config` the file's content counts; with it, this one, which options may have changed.

    A file's digest is cached by path, size and modification time in the user's cache directory
    (`$XDG_CACHE_HOME/vlm-serve`). If that is unwritable, or another user could have written it,
    files are hashed at every start.

    Raises:
        CheckpointError: a file is missing or unreadable.
    """
    path = Path(path)
    remembered = _recall()
    fresh: dict[str, _Entry] = {}
    digests = []
    for file in weight_files(path):
        key = str(file.resolve())
        try:
            status = os.stat(key)
            known = remembered.get(key)
            if known is None or known[:2] != (status.st_size, status.st_mtime_ns):
                known = (status.st_size, status.st_mtime_ns, _hash_file(key))
                if time.time() - status.st_mtime > _SETTLED_SECONDS:
                    fresh[key] = known
        except OSError as error:
            raise CheckpointError(f"{file.name} cannot be read") from error
        digests.append(bytes.fromhex(known[2]))
    if fresh:
        _remember(fresh)
    return blake3(_DOMAIN + _config_digest(path, config) + b"".join(digests)).digest()


def _hash_file(path: str) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _config_digest(path: Path, config: Any) -> bytes:
    try:
        if config is None:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
            if len(digest) == 64
        }
    except (OSError, ValueError, TypeError, AttributeError):
        # Unreadable, damaged or another user's: treat it as empty; the next write replaces it.
        return {}


def _remember(fresh: dict[str, _Entry]) -> None:
    """Merge into the file and replace it whole, so that readers never see half of it."""
    folder = cache_path()
    if folder is None:
        return
    merged = _recall() | fresh
    kept = dict(list(merged.items())[-_MOST_REMEMBERED:])
    try:
        secure_cache(folder)
        make_private(folder)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as file:
            json.dump(kept, file)
        os.replace(file.name, folder / _MEMORY_FILE)
    except OSError:
        return
