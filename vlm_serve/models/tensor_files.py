"""The tensors of a checkpoint's files, whatever their format."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from vlm_serve.errors import CheckpointError
from vlm_serve.models.files import weight_files
from vlm_serve.models.gguf.folder import gguf_files, open_tensors
from vlm_serve.system.foreign_files import foreign


class TensorFile(Protocol):
    """Tensors by their names. They are read when they are asked for.

    Attributes:
        nbytes: size of the file.
    """

    nbytes: int

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as stored, which must not be written to."""
        ...


class SafetensorsFile:
    """A file of safetensors, mapped into memory.

    Raises:
        CheckpointError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._handle: safe_open = safe_open(path, framework="pt")
            self.nbytes = path.stat().st_size
        except (OSError, SafetensorError) as error:
            what = foreign(path) or "is not a readable safetensors file"
            raise CheckpointError(f"{path.name} {what}") from error

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        names: Iterable[str] = self._handle.keys()  # type: ignore[no-untyped-call]
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._handle.get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as stored."""
        found: torch.Tensor = self._handle.get_tensor(name)  # type: ignore[no-untyped-call]
        return found


def open_files(path: Path) -> list[TensorFile]:
    """Return the files of a checkpoint's folder, or those that it points to.

    Raises:
        CheckpointError: one is missing or broken.
    """
    files = gguf_files(path)
    if files is not None:
        return [open_tensors(files)]
    return [SafetensorsFile(each) for each in weight_files(path)]
