"""Log-probabilities of a prompt's tokens, computed from logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlm_serve.cache.logprobs import row_type
from vlm_serve.cache.records import LogprobRows
from vlm_serve.kernels.sampling.row_sums import log_softmax

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
