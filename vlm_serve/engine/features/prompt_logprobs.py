"""Log-probabilities of a prompt's tokens: computed from logits, and collected for a request.

The rows of a request may come from its own steps or from the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from vlm_serve.cache.logprobs import RowPiece, WantedRows, row_type
from vlm_serve.cache.records import LogprobRows
from vlm_serve.engine.requests.outputs import PromptLogprobs
from vlm_serve.engine.requests.row_sums import log_softmax

_ROWS_AT_ONCE = 32
"""Number of rows whose softmax is in memory at the same time."""


def logprob_rows(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> LogprobRows:
    """Compute the rows of tokens, see `row_type`; each row depends on its own logits only.

    Args:
        logits: float32 `[R, vocab]`, each given everything before the token of its row.
        token_ids: the R tokens.
        top: number of most likely tokens per row.
    """
    rows = np.empty(len(token_ids), row_type(top))
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        part = rows[first : first + _ROWS_AT_ONCE]
        logprobs = log_softmax(logits[first : first + len(part)])
        ids = torch.tensor(token_ids[first : first + len(part)], device=logprobs.device)
        chosen = logprobs.gather(1, ids[:, None])
        part["logprob"] = chosen[:, 0].cpu().numpy()
        part["rank"] = ((logprobs > chosen).sum(dim=-1) + 1).cpu().numpy()
        if top:
            _name_likeliest(part, logprobs)
    return rows


def _name_likeliest(part: LogprobRows, logprobs: torch.Tensor) -> None:
    """Fill in the most likely tokens; ties go to lower ids. So the first k of a longer row equal a
    row of k."""
    top = part["ids"].shape[1]
    values, ids = (
        tensor.cpu().numpy() for tensor in torch.topk(logprobs, min(top + 1, logprobs.shape[1]))
    )
    for row in np.flatnonzero(values[:, top - 1] == values[:, -1]) if values.shape[1] > top else ():
        level = float(values[row, -1])  # shared by the last token named and the first one left out
        equals = torch.nonzero(logprobs[row] == level)[:, 0].cpu().numpy()
        better = int((values[row] > level).sum())
        ids[row, better:top] = equals[: top - better]
    order = np.lexsort((ids[:, :top], -values[:, :top]))
    part["ids"] = np.take_along_axis(ids[:, :top], order, axis=1)
    part["logprobs"] = np.take_along_axis(values[:, :top], order, axis=1)


class PromptLog:
    """Rows of one request, contiguous from the first requested token.

    Args:
        first: first requested token; the prompt's first token has no row.
        end: number of tokens of the prompt.
        top: number of most likely tokens per row.

    Attributes:
        first: first token whose row is wanted.
        next: first token whose row is missing.
        num_reused: number of rows from the cache.
    """

    def __init__(self, first: int, end: int, top: int) -> None:
        self.first = self.next = max(1, first)
        self.num_reused = 0
        self._end = end
        self._rows = np.empty(max(0, end - self.first), row_type(top))
        self._top = top
        self._report: tuple[PromptLogprobs, ...] | None = None

    @property
    def wanted(self) -> WantedRows | None:
        """Missing rows, None if there are none."""
        return WantedRows(self.next, self._top) if self.next < self._end else None

    @property
    def known(self) -> RowPiece:
        return RowPiece(self.first, self._rows[: self.next - self.first])

    def to_report(self, start: int, end: int) -> tuple[int, int]:
        """Return the range (first, last + 1) of the tokens in `[start, end)` that precede a missing
        row."""
        assert self.next == self._end or start < self.next, "rows would be skipped"
        return max(start, self.next - 1), min(end, self._end - 1)

    def put(self, start: int, rows: LogprobRows) -> None:
        """Store rows of the tokens from `start` on. Rows that exist already are kept."""
        assert start <= self.next, "rows with a hole before them"
        new = rows[self.next - start :]
        place = self.next - self.first
        self._rows[place : place + len(new)] = new
        self.next += len(new)

    def replay(self, pieces: Iterable[RowPiece]) -> None:
        """Take over cached rows, in order."""
        before = self.next
        for piece in pieces:
            self.put(piece.start, piece.rows)
        self.num_reused += self.next - before

    def report(self, token_ids: Sequence[int]) -> tuple[PromptLogprobs, ...]:
        """Return all rows in the form for callers.

        Args:
            token_ids: tokens of the prompt.
        """
        assert self.wanted is None, "rows are missing"
        if self._report is None:
            rows = self._rows
            columns = zip(
                token_ids[self.first :],
                *(rows[name].tolist() for name in ("logprob", "rank", "ids", "logprobs")),
                strict=True,
            )
            self._report = tuple(
                PromptLogprobs({token: logprob, **dict(zip(ids, logprobs, strict=True))}, rank)
                for token, logprob, rank, ids, logprobs in columns
            )
        return self._report
