"""One GGUF file: its metadata, and the table of its tensors, checked against the file's size."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.block_types import SUPPORTED, UNSUPPORTED, BlockType
from vlm_serve.models.gguf.cursor import Cursor, Value

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20
_MOST_TENSORS = _MOST_KEYS = 1 << 16
_MOST_DIMENSIONS = 4
_LEAST_TENSOR, _LEAST_KEY = 8 + 4 + 8 + 4 + 8, 8 + 4 + 1
"""Bytes of the shortest entries."""
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: its type, its shape with rows first, and where its bytes lie in the file."""

    type: BlockType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GgufFile:
    """A file, mapped into memory. Bytes of tensors are read when they are touched.

    Args:
        path: of the file.

    Attributes:
        path: as given.
        metadata: values by their keys.
        tensors: by their names.
        nbytes: size of the file.

    Raises:
        CheckpointError: it is damaged, or has tensors of an unsupported type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Private pages: torch wants writable memory, and nothing is ever written to it.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or "it is empty"
            raise CheckpointError(f"{path.name} cannot be read: {problem}") from error
        self.nbytes = len(self._data)
        cursor = Cursor(self._data, path.name)
        tensors, keys = self._header(cursor)
        self.metadata = self._metadata(cursor, keys)
        self.tensors = self._table(cursor, tensors)

    def _header(self, cursor: Cursor) -> tuple[int, int]:
        if bytes(cursor.take(4, "the header")) != MAGIC:
            raise CheckpointError(f"{self.path.name} is not a GGUF file")
        version = cursor.number("I", "the header")
        if version not in _VERSIONS:
            (turned,) = struct.unpack(">I", struct.pack("<I", version))
            what = "is big-endian" if turned in _VERSIONS else f"has version {version}"
            raise CheckpointError(
                f"{self.path.name} {what}, which is not supported: convert it anew"
            )
        tensors, keys = cursor.number("Q", "the header"), cursor.number("Q", "the header")
        for count, most, least, what in (
            (tensors, _MOST_TENSORS, _LEAST_TENSOR, "tensors"),
            (keys, _MOST_KEYS, _LEAST_KEY, "keys"),
        ):
            if count > most or count * least > cursor.left:
                raise cursor.damaged(f"its header announces {count} {what}")
        return tensors, keys

    def _metadata(self, cursor: Cursor, count: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for index in range(count):
            key = cursor.text(f"the name of key {index}")
            if key in found:
                raise cursor.damaged(f"it has the key {_shown(key)} twice")
            found[key] = cursor.value(_shown(key))
        return found

    def _table(self, cursor: Cursor, count: int) -> dict[str, TensorEntry]:
        raw: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(count):
            name = cursor.text(f"the name of tensor {index}")
            shown = _shown(name)
            dimensions = cursor.number("I", shown)
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise cursor.damaged(f"{shown} has {dimensions} dimensions")
            sizes = tuple(cursor.number("Q", shown) for _ in range(dimensions))
            kind, offset = cursor.number("I", shown), cursor.number("Q", shown)
            if name in raw:
                raise cursor.damaged(f"it has the tensor {shown} twice")
            raw[name] = sizes, kind, offset
        alignment = self._alignment(cursor)
        first = -(-cursor.at // alignment) * alignment
        found = {
            name: self._entry(cursor, _shown(name), *entry, first, alignment)
            for name, entry in raw.items()
        }
        self._check_apart(cursor, found)
        return found

    def _alignment(self, cursor: Cursor) -> int:
        value = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(value, int) or value % 8 or not 0 < value <= _MOST_ALIGNMENT:
            raise cursor.damaged("general.alignment is no multiple of 8 bytes")
        return value

    def _entry(
        self,
        cursor: Cursor,
        name: str,
        sizes: tuple[int, ...],
        kind: int,
        offset: int,
        first: int,
        alignment: int,
    ) -> TensorEntry:
        found = SUPPORTED.get(kind)
        if found is None:
            known = ", ".join(each.name for each in SUPPORTED.values())
            raise CheckpointError(
                f"{name} in {self.path.name} has the type {UNSUPPORTED.get(kind, kind)}, which is "
                f"not supported; supported are {known}"
            )
        if min(sizes) < 1 or sizes[0] % found.values:
            raise cursor.damaged(f"{name} of type {found.name} has the shape {list(sizes)}")
        nbytes = math.prod(sizes) // found.values * found.nbytes
        if offset % alignment:
            raise cursor.damaged(f"{name} begins between multiples of {alignment} bytes")
        if first + offset + nbytes > self.nbytes:
            raise cursor.damaged(f"{name} reaches beyond its end; is the download complete?")
        return TensorEntry(found, sizes[::-1], first + offset, nbytes)

    def _check_apart(self, cursor: Cursor, tensors: dict[str, TensorEntry]) -> None:
        end = 0
        for name, each in sorted(tensors.items(), key=lambda item: item[1].start):
            if each.start < end:
                raise cursor.damaged(f"{_shown(name)} lies over another tensor")
            end = each.start + each.nbytes

    def numbers(self, name: str) -> torch.Tensor:
        """Return a tensor of plain numbers, which must not be written to."""
        entry = self.tensors[name]
        count = math.prod(entry.shape)
        found = torch.frombuffer(
            self._data, dtype=_TYPES[entry.type.name], count=count, offset=entry.start
        )
        return found.view(entry.shape)

    def blocks(self, name: str) -> torch.Tensor:
        """Return the bytes of a tensor of blocks, uint8 `[..., rows, bytes of a row]`; they must
        not be written to."""
        entry = self.tensors[name]
        found = torch.frombuffer(
            self._data, dtype=torch.uint8, count=entry.nbytes, offset=entry.start
        )
        row = entry.shape[-1] // entry.type.values * entry.type.nbytes
        return found.view(*entry.shape[:-1], row)


def _shown(name: str) -> str:
    """Return a name for a message: short, in one line."""
    return name if name.isprintable() and len(name) <= 80 else repr(name[:80])
