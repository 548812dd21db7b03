"""Sampling of many rows at once: changes to logits, draws, log-probabilities of the likeliest.

Of equal logits those of lower ids come first. Sums are those of whole numbers, which have no order:
a row's token depends on its own logits and numbers alone, whatever rows are beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.sampling import reference
from vlm_serve.kernels.sampling.reference import Found, Rows

__all__ = ["DRAWN", "GREEDY", "REPORT", "Found", "Mark", "Rows", "sample_rows"]

GREEDY, DRAWN, REPORT = range(3)
"""Kinds of rows."""


class Mark(NamedTuple):
    """The whole numbers of a row, in the order of `Rows.marks`.

    Attributes:
        line: its row of the logits.
        kind: `GREEDY`, `DRAWN`, or `REPORT`: the likeliest of the model's own distribution.
        top_k: how many tokens are left; 0 for all. Of a report, how many are told.
        slot: its row of the counts; -1 without penalties.
        newest: the token that is counted beside them; -1 for none, -2 for that of `before`.
        mask: its row of the masks; -1 allows all tokens.
        first_bias, end_bias: its part of the biases.
        told: 0 if no log-probability is wanted; else 1 plus how many likeliest are told. Of a
            report, the row that it is of.
        changed: whether biases and penalties apply.
        first_named, end_named: its part of the biases' ids: further tokens that are told.
    """

    line: int
    kind: int
    top_k: int = 0
    slot: int = -1
    newest: int = -1
    mask: int = -1
    first_bias: int = 0
    end_bias: int = 0
    told: int = 0
    changed: int = 0
    first_named: int = 0
    end_named: int = 0


_sample = Op(reference.sample_rows, triton="vlm_serve.kernels.sampling.triton:sample_rows")


def sample_rows(
    logits: torch.Tensor,
    rows: Rows,
    counts: torch.Tensor,
    into: Found,
    *,
    draws: bool = True,
    unlimited: bool = True,
) -> None:
    """Sample a token of each row, and tell the likeliest; count the newest tokens at last.

    Args:
        logits: float32 `[L, vocab]`, the columns contiguous.
        rows: what is sampled. Those of reports come last.
        counts: int32 `[slots, vocab]`: how often an answer has each token, plus `PROMPT` if its
            prompt has it.
        into: where results go.
        draws: False if all rows are greedy and nothing is reported.
        unlimited: False if no row is drawn without top_k.
    """
    _sample(logits.device, logits, rows, counts, into, draws=draws, unlimited=unlimited)
