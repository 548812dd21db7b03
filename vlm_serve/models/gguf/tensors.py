"""The tensors of a checkpoint, read from GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.blocks import decode
from vlm_serve.models.gguf.reader import BlockType, GgufFile

_AT_ONCE = 1 << 22
"""Values of blocks that become numbers at a time."""

Indices = Callable[[], torch.Tensor]
Change = Literal["", "less one", "decay", "frames"]


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor, and how it follows from one in a file.

    Attributes:
        source: name in the file.
        shape: in the checkpoint.
        index: in the file's first dimension, of a tensor that stacks experts.
        rows, columns: returns those to take, in their order; None: all.
        change: of the numbers. "less one": the file adds 1 to centred norms. "decay": it holds the
            negated exponential. "frames": `second` is the kernel of the second frame.
    """

    source: str
    shape: tuple[int, ...]
    index: int | None = None
    rows: Indices | None = None
    columns: Indices | None = None
    change: Change = ""
    second: str = ""


def blocks_of(weight: str, kind: BlockType) -> str:
    """Return the name of a weight's blocks."""
    return f"{weight}_{kind.name}"


def columns_of(weight: str) -> str:
    """Return the name of the order of a weight's columns, if it has another one in the file."""
    return f"{weight}_columns"


class GgufTensors:
    """Tensors by the names of a checkpoint.

    A weight in blocks is there three times: as numbers, as its blocks (`blocks_of`) and, where its
    columns are in another order, as that order (`columns_of`).

    Args:
        parts: files, each with the tensors made from it.

    Attributes:
        nbytes: size of the files.
    """

    def __init__(self, parts: Iterable[tuple[GgufFile, Mapping[str, Made]]]) -> None:
        self._made: dict[str, tuple[GgufFile, Made]] = {}
        self._coded: dict[str, str] = {}
        self._columns: dict[str, str] = {}
        self.nbytes = 0
        for file, tensors in parts:
            self.nbytes += file.nbytes
            for name, made in tensors.items():
                self._made[name] = file, made
                kind = file.tensors[made.source].type
                if kind.quantised:
                    self._coded[blocks_of(name, kind)] = name
                    if made.columns is not None:
                        self._columns[columns_of(name)] = name

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return [*self._made, *self._coded, *self._columns]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        if name in self._columns:
            return (self._made[self._columns[name]][1].shape[1],)
        if name in self._coded:
            file, made = self._made[self._coded[name]]
            kind = file.tensors[made.source].type
            return made.shape[0], made.shape[1] // kind.values * kind.nbytes
        return self._made[name][1].shape

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, which must not be written to."""
        if name in self._columns:
            made = self._made[self._columns[name]][1]
            assert made.columns is not None
            return made.columns()
        if name in self._coded:
            file, made = self._made[self._coded[name]]
            return _chosen(file.blocks(made.source), made)
        file, made = self._made[name]
        return _changed(file, made)


def types_of(file: GgufFile, tensors: Mapping[str, Made]) -> dict[str, BlockType]:
    """Return the types of the weights in blocks."""
    kinds = {name: file.tensors[made.source].type for name, made in tensors.items()}
    for name, kind in kinds.items():
        if kind.quantised and len(tensors[name].shape) != 2:
            raise CheckpointError(
                f"{tensors[name].source} in {file.path.name} has the type {kind.name}, which is "
                "not supported for it"
            )
    return {name: kind for name, kind in kinds.items() if kind.quantised}


def _chosen(whole: torch.Tensor, made: Made) -> torch.Tensor:
    """Return the rows of one expert, or some of them."""
    if made.index is not None:
        whole = whole[made.index]
    return whole if made.rows is None else whole[made.rows()]


def _changed(file: GgufFile, made: Made) -> torch.Tensor:
    kind = file.tensors[made.source].type
    if kind.quantised:
        found = _values(_chosen(file.blocks(made.source), made), kind)
    else:
        found = _chosen(file.numbers(made.source), made)
    if made.columns is not None:
        found = found[:, made.columns()]
    if made.change == "less one":
        found = found.float() - 1
    elif made.change == "decay":
        found = found.float().neg().log()
    elif made.change == "frames":
        found = torch.stack([found, file.numbers(made.second)], 2)
    return found.reshape(made.shape)


def _values(blocks: torch.Tensor, kind: BlockType) -> torch.Tensor:
    rows, width = blocks.shape[0], blocks.shape[1] // kind.nbytes * kind.values
    found = torch.empty(rows, width)
    step = max(1, _AT_ONCE // width)
    for first in range(0, rows, step):
        found[first : first + step] = decode(kind, blocks[first : first + step]).values()
    return found
