"""Classifiers and reward models: a head that labels prompts in place of one that continues them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlm_serve.errors import CheckpointError

HEAD = "score.weight"


@dataclass(frozen=True, slots=True)
class Classifier:
    """The head of a checkpoint whose architecture is a `*ForSequenceClassification`.

    Attributes:
        labels: their names.
        activation: what makes probabilities of logits: "softmax", "sigmoid" or "identity".
        pad: the token that the pooled position is never at; None: it is the last one.
    """

    labels: tuple[str, ...]
    activation: str
    pad: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Classifier | None:
        """Return the head that a config.json describes; None if it names another architecture.
        Raises CheckpointError for unknown values."""
        kinds, named = config.get("architectures"), config.get("id2label") or {}
        names = map(str, kinds if isinstance(kinds, list) else ())
        if not any(name.endswith("ForSequenceClassification") for name in names):
            return None
        count = len(named) if isinstance(named, Mapping) and named else config.get("num_labels", 2)
        if not isinstance(named, Mapping) or type(count) is not int or not 1 <= count <= 1 << 16:
            raise CheckpointError(f"num_labels {count!r} in config.json is no number of labels")
        # As vLLM has it. Cross encoders of sentence-transformers name a class of torch.
        usual, inner = "sigmoid" if count == 1 else "softmax", config.get("sentence_transformers")
        known = {"None": usual, "single_label_classification": usual, "regression": "identity"}
        kind = known.get(problem := str(config.get("problem_type")), "sigmoid")
        chosen = inner.get("activation_fn") if isinstance(inner, Mapping) else None
        activation = str(chosen or kind).rpartition(".")[2].lower()
        if problem not in (*known, "multi_label_classification"):
            raise CheckpointError(f"problem_type {problem!r} in config.json is not supported")
        if activation not in ("identity", "sigmoid", "softmax"):
            raise CheckpointError(f"activation_fn {chosen!r} in config.json is not supported")
        labels = tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(count))
        return cls(labels, activation, (config.get("text_config") or config).get("pad_token_id"))

    def values(self, logits: Any, *, activated: bool = True) -> list[float]:
        """Return a value per label: probabilities, or the logits as they are."""
        wide = np.asarray(logits, np.float64)
        if activated and self.activation == "softmax":
            wide = np.exp(wide - wide.max()) / np.exp(wide - wide.max()).sum()
        elif activated and self.activation == "sigmoid":
            wide = 1 / (1 + np.exp(np.minimum(-wide, 700.0)))
        return [float(value) for value in wide]
