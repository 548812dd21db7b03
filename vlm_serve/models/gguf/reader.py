"""One GGUF file: its metadata, and the table of its tensors, checked against the file's size.

Values are read one after the other, never beyond the end.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlm_serve.errors import CheckpointError

MOST_TEXT = 64 << 20
"""Bytes of all texts in the metadata of a file. Vocabularies of 250 000 tokens take 8 MiB."""
MOST_TEXTS = 1 << 21
MOST_NUMBERS = 1 << 22
"""Numbers in an array."""
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9
MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20
_MOST_TENSORS = _MOST_KEYS = 1 << 16
_MOST_DIMENSIONS = 4
_LEAST_TENSOR, _LEAST_KEY = 8 + 4 + 8 + 4 + 8, 8 + 4 + 1
"""Bytes of the shortest entries."""
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Value = int | float | bool | str | list[str] | np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type: so many values take so many bytes. A number is a block of one value."""

    name: str
    values: int
    nbytes: int

    @property
    def quantised(self) -> bool:
        """Return True if a block holds several values."""
        return self.values > 1


F32, F16, BF16 = BlockType("F32", 1, 4), BlockType("F16", 1, 2), BlockType("BF16", 1, 2)
SUPPORTED = {
    0: F32,
    1: F16,
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BF16,
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}
"""By their numbers in files."""
BY_NAME = {kind.name: kind for kind in SUPPORTED.values()}
UNSUPPORTED = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    41: "Q1_0",
    42: "Q2_0",
}
"""Names of the others, for messages."""


class Cursor:
    """A place in the bytes of a file.

    Args:
        data: the file.
        name: of the file, for messages.

    Raises:
        CheckpointError: from every method: the file ends too early, or a size is absurd.
    """

    def __init__(self, data: mmap.mmap | bytes, name: str) -> None:
        self._data = memoryview(data)
        self._name = name
        self._texts = self._characters = 0
        self.at = 0

    @property
    def left(self) -> int:
        """Return the number of bytes from here to the end."""
        return len(self._data) - self.at

    def take(self, size: int, field: str) -> memoryview:
        """Return the next bytes."""
        if size > self.left:
            raise self.damaged(f"{field} reaches beyond its end")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, code: str, field: str) -> Any:
        """Return a number of a format of `struct`."""
        size = struct.calcsize("<" + code)
        if code == "?":
            return self.take(1, field)[0] != 0
        return struct.unpack("<" + code, self.take(size, field))[0]

    def text(self, field: str) -> str:
        """Return a text behind its length."""
        size = self.number("Q", field)
        self._texts += 1
        self._characters += size
        if self._characters > MOST_TEXT or self._texts > MOST_TEXTS:
            raise self.damaged(
                f"its metadata has more than {MOST_TEXTS} texts or {MOST_TEXT >> 20} MiB of them"
            )
        try:
            return str(self.take(size, field), "utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{field} is not UTF-8") from None

    def value(self, field: str) -> Value:
        """Return a value of the metadata behind its type."""
        kind = self.number("I", field)
        if kind == _TEXT:
            return self.text(field)
        if kind == _ARRAY:
            return self._array(field)
        if kind not in _NUMBERS:
            raise self.damaged(f"{field} has the unknown type {kind}")
        value: int | float | bool = self.number(_NUMBERS[kind], field)
        return shortest(value) if kind == 6 else value

    def _array(self, field: str) -> list[str] | np.ndarray[Any, Any]:
        kind, count = self.number("I", field), self.number("Q", field)
        if kind == _TEXT:
            if count * 8 > self.left:
                raise self.damaged(f"{field} reaches beyond its end")
            return [self.text(field) for _ in range(count)]
        if kind not in _NUMBERS:
            raise self.damaged(f"{field} is an array of the unsupported type {kind}")
        if count > MOST_NUMBERS:
            raise self.damaged(f"{field} has more than {MOST_NUMBERS} numbers")
        dtype = np.dtype("<" + _NUMBERS[kind]) if kind != 7 else np.dtype("u1")
        numbers = np.frombuffer(self.take(count * dtype.itemsize, field), dtype)
        return numbers != 0 if kind == 7 else numbers

    def damaged(self, how: str) -> CheckpointError:
        """Return the error of a damaged file; `how` is the rest of the sentence."""
        return CheckpointError(f"{self._name} is damaged: {how}")


def shortest(value: float) -> float:
    """Return the number with the fewest digits that is this float32: 1e-06, not 9.99999997e-07."""
    return float(str(np.float32(value)))


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
            problem = "is big-endian" if turned in _VERSIONS else f"has version {version}"
            raise CheckpointError(
                f"{self.path.name} {problem}, which is not supported: convert it anew"
            )
        tensors, keys = cursor.number("Q", "the header"), cursor.number("Q", "the header")
        for count, most, least, problem in (
            (tensors, _MOST_TENSORS, _LEAST_TENSOR, "tensors"),
            (keys, _MOST_KEYS, _LEAST_KEY, "keys"),
        ):
            if count > most or count * least > cursor.left:
                raise cursor.damaged(f"its header announces {count} {problem}")
        return tensors, keys

    def _metadata(self, cursor: Cursor, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for index in range(count):
            key = cursor.text(f"the name of key {index}")
            if key in metadata:
                raise cursor.damaged(f"it has the key {_shown(key)} twice")
            metadata[key] = cursor.value(_shown(key))
        return metadata

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
        entries = {
            name: self._entry(cursor, _shown(name), *entry, first, alignment)
            for name, entry in raw.items()
        }
        self._check_apart(cursor, entries)
        return entries

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
        block = SUPPORTED.get(kind)
        if block is None:
            known = ", ".join(known_type.name for known_type in SUPPORTED.values())
            raise CheckpointError(
                f"{name} in {self.path.name} has the type {UNSUPPORTED.get(kind, kind)}, which is "
                f"not supported; supported are {known}"
            )
        if min(sizes) < 1 or sizes[0] % block.values:
            raise cursor.damaged(f"{name} of type {block.name} has the shape {list(sizes)}")
        nbytes = math.prod(sizes) // block.values * block.nbytes
        if offset % alignment:
            raise cursor.damaged(f"{name} begins between multiples of {alignment} bytes")
        if first + offset + nbytes > self.nbytes:
            raise cursor.damaged(f"{name} reaches beyond its end; is the download complete?")
        return TensorEntry(block, sizes[::-1], first + offset, nbytes)

    def _check_apart(self, cursor: Cursor, tensors: dict[str, TensorEntry]) -> None:
        end = 0
        for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
            if entry.start < end:
                raise cursor.damaged(f"{_shown(name)} lies over another tensor")
            end = entry.start + entry.nbytes

    def numbers(self, name: str) -> torch.Tensor:
        """Return a tensor of plain numbers, which must not be written to."""
        entry = self.tensors[name]
        count = math.prod(entry.shape)
        tensor = torch.frombuffer(
            self._data, dtype=_TYPES[entry.type.name], count=count, offset=entry.start
        )
        return tensor.view(entry.shape)

    def blocks(self, name: str) -> torch.Tensor:
        """Return the bytes of a tensor of blocks, uint8 `[..., rows, bytes of a row]`; they must
        not be written to."""
        entry = self.tensors[name]
        tensor = torch.frombuffer(
            self._data, dtype=torch.uint8, count=entry.nbytes, offset=entry.start
        )
        row = entry.shape[-1] // entry.type.values * entry.type.nbytes
        return tensor.view(*entry.shape[:-1], row)


def _shown(name: str) -> str:
    """Return a name for a message: short, in one line."""
    return name if name.isprintable() and len(name) <= 80 else repr(name[:80])


class Metadata:
    """The values of a file by their keys.

    Args:
        values: as read.
        name: of the file, for messages.
        prefix: of keys that `own` names.

    Raises:
        CheckpointError: from every method; names the key.
    """

    def __init__(self, values: Mapping[str, Value], name: str, prefix: str = "") -> None:
        self._values = values
        self.name = name
        self._prefix = prefix

    def section(self, prefix: str) -> Metadata:
        """Return the same values, by keys behind a prefix."""
        return Metadata(self._values, self.name, prefix)

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._values

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number. Arrays of one number for every layer count as one."""
        value = self._required(key, default)
        if isinstance(value, np.ndarray):
            distinct = (
                {int(number) for number in value if number} if value.dtype.kind in "iu" else set()
            )
            value = distinct.pop() if len(distinct) == 1 else value.tolist()
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self._wrong(key, "a positive integer", value)
        return value

    def count(self, key: str) -> int:
        """Return a whole number that may be 0, as it is without the key."""
        value = self._values.get(self._prefix + key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self._wrong(key, "a number of things", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._required(key, default)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not math.isfinite(float(value)):
            raise self._wrong(key, "a number", value)
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def texts(self, key: str) -> list[str]:
        """Return an array of texts."""
        value = self._required(key, None)
        if not isinstance(value, list):
            raise self._wrong(key, "an array of texts", value)
        return value

    def numbers(self, key: str) -> list[Any] | None:
        """Return an array of numbers or flags; None without the key."""
        value = self._values.get(self._prefix + key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray):
            raise self._wrong(key, "an array of numbers", value)
        return list(value.tolist())

    def expect(self, key: str, *known: Value) -> None:
        """Refuse a value outside of the supported ones, if the key is there."""
        value = self._values.get(self._prefix + key)
        if value is not None and (isinstance(value, np.ndarray) or value not in known):
            raise CheckpointError(
                f"{self._prefix}{key} {_short(value)} in {self.name} is not supported, only "
                f"{' or '.join(map(repr, known))}"
            )

    def _required(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key, default)
        if value is None:
            raise CheckpointError(f"{self.name} lacks {self._prefix}{key}")
        return value

    def _wrong(self, key: str, wanted: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"{self._prefix}{key} in {self.name} must be {wanted}, not {_short(value)}"
        )


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, np.ndarray | list) else f"{len(value)} values"
    return text if len(text) <= 80 else f"{text[:77]}..."
