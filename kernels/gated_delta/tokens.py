"""The packed tokens of a step of the gated delta rule."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tokens(NamedTuple):
    """Inputs of the packed tokens; shapes and dtypes as `chunk_gated_delta` takes them.

    Attributes:
        q, k: queries and keys, not normalised.
        v: values.
        g: log decay.
        beta: write strength.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
