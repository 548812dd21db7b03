"""Routed experts of one choice, token by token, from its own steps or from the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from vlm_serve.cache.experts import ExpertPiece

Rows = npt.NDArray[Any]
Gaps = tuple[tuple[int, int], ...]

_FIRST_CAPACITY = 64


class ExpertLog:
    """Rows `[tokens, layers, top_k]` of expert ids. There may be gaps: cached tokens without
    recorded rows. Rows written again (after a preemption) replace the old ones."""

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._known = np.zeros(0, dtype=bool)

    def put(self, start: int, rows: Rows) -> None:
        """Store the rows of tokens `[start, start + len(rows))`."""
        end = start + len(rows)
        if self._rows is None:
            self._rows = np.zeros((0, *rows.shape[1:]), dtype=rows.dtype)
        if end > len(self._known):
            self._resize(max(end, 2 * len(self._known), _FIRST_CAPACITY))
        self._rows[start:end] = rows
        self._known[start:end] = True

    def replay(self, pieces: Iterable[ExpertPiece]) -> None:
        """Take over the rows of cached tokens. Where the cache has none, rows known already are
        kept."""
        for piece in pieces:
            if piece.rows is not None:
                self.put(piece.start, piece.rows[: piece.end - piece.start])

    def num_unknown(self, end: int) -> int:
        """Return how many of the tokens `[0, end)` have no row."""
        return end - int(self._known[:end].sum())

    def take(self, start: int, end: int) -> tuple[Rows, Gaps]:
        """Return the rows of tokens `[start, end)`, zero where unknown, and the unknown positions
        as (first, last + 1) pairs."""
        assert self._rows is not None, "nothing was ever computed"
        known = np.zeros(end - start, dtype=bool)
        have = self._known[start:end]
        known[: len(have)] = have
        rows = np.zeros((end - start, *self._rows.shape[1:]), dtype=self._rows.dtype)
        rows[: len(have)] = self._rows[start:end]
        edges = np.flatnonzero(np.diff(np.concatenate(([True], known, [True]))))
        bounds = [int(edge) + start for edge in edges]
        return rows, tuple(zip(bounds[::2], bounds[1::2], strict=True))

    def copy(self) -> ExpertLog:
        """Return an independent copy, for a choice that forks."""
        twin = ExpertLog()
        twin._rows = None if self._rows is None else self._rows.copy()
        twin._known = self._known.copy()
        return twin

    def _resize(self, capacity: int) -> None:
        assert self._rows is not None
        rows = np.zeros((capacity, *self._rows.shape[1:]), dtype=self._rows.dtype)
        rows[: len(self._rows)] = self._rows
        known = np.zeros(capacity, dtype=bool)
        known[: len(self._known)] = self._known
        self._rows, self._known = rows, known
