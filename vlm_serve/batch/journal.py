"""An append-only output file: after a kill it shows which jobs are done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vlm_serve.errors import ConfigError

Row = dict[str, Any]


class Journal:
    """JSON lines, one per job, each with the job's `id`.

    A line counts once its newline is written. A killed process leaves complete lines and at most
    one partial line, truncated on opening.

    Args:
        path: the file; created if missing.

    Attributes:
        done: ids of the jobs with a line.

    Raises ConfigError if the file cannot be written or has other content.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, int] = {}
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", param="output") from None
        try:
            self._scan()
        except ConfigError:
            self._file.close()
            raise

    def _scan(self) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            self._places[self._id_of(line, number)] = end
            end += len(line)
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)

    def _id_of(self, line: bytes, number: int) -> str:
        try:
            row_id = json.loads(line)["id"]
        except (ValueError, KeyError, TypeError):
            row_id = None
        if not isinstance(row_id, str) or row_id in self._places:
            raise ConfigError(
                f"{self.path}, line {number}: this is not the output of an earlier run; "
                "give another output file or remove it",
                param="output",
            )
        return row_id

    @property
    def done(self) -> frozenset[str]:
        return frozenset(self._places)

    def append(self, row: Row) -> None:
        """Append one job's line and flush it to the operating system."""
        line = encode_row(row)
        self._places[row["id"]] = self._file.tell()
        self._file.write(line)
        self._file.flush()

    def rows(self, ids: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield the rows of the given jobs in that order, or all rows in file order."""
        with self.path.open("rb") as file:
            for name in self._places if ids is None else ids:
                file.seek(self._places[name])
                yield json.loads(file.readline())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def encode_row(row: Row) -> bytes:
    """Return a row as a line."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def partial_of(output: Path, rows_of: Callable[[Path], Iterable[Row]]) -> Path:
    """Return the path of the partial file, for an output that is written at the end.

    It is restored from the output if it is missing.

    Args:
        rows_of: reads the output of an earlier run.
    """
    path = output.with_name(output.name + ".partial")
    if output.exists() and not path.exists():
        replace_file(path, map(encode_row, rows_of(output)))
    return path


def replace_file(path: Path, chunks: Iterator[bytes]) -> None:
    """Replace a file atomically: a kill leaves the old one or the new one."""
    written = path.with_name(path.name + ".new")
    with written.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
