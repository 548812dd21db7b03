"""What engines that pool make of prompts: embeddings and scores."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
_SMALLEST = 1e-12


def embedding_of(hidden: Vector, dimensions: int | None = None) -> Vector:
    """Return a hidden state, cut to its first dimensions, with a length of 1."""
    cut = hidden if dimensions is None else hidden[:dimensions]
    length = float(np.linalg.norm(cut.astype(np.float64)))
    return (cut / max(length, _SMALLEST)).astype(np.float32)


def score_of(logits: Vector) -> float:
    """Return the probability of yes, from the logits of yes and no."""
    yes, no = (float(each) for each in logits)
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))
