"""Labels of options, and the tokens that tell them apart.

Up to 26 options have a letter each, more have two letters. A tokenizer may write a label with
several tokens. Then its probability is that of the shortest beginning that no other label has, so
only the beginnings that labels share are computed.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.decisions import Kind

LETTERS = tuple(string.ascii_uppercase)
Ids = tuple[int, ...]


def labels_of(kind: Kind, count: int) -> tuple[str, ...]:
    """Return the labels of a question with so many options."""
    if kind == "predicate":
        return "Yes", "No"
    if count <= len(LETTERS):
        return LETTERS[:count]
    return tuple(map("".join, islice(product(LETTERS, repeat=2), count)))


@dataclass(frozen=True, slots=True)
class Beginning:
    """Tokens that labels begin with.

    Attributes:
        ids: these tokens, none for the beginning of all.
        following: the tokens that come next, each once.
    """

    ids: Ids
    following: Ids


@dataclass(frozen=True, slots=True)
class LabelTree:
    """Labels by their beginnings.

    Args:
        labels: the tokens of each.

    Attributes:
        shared: the beginnings of several labels, and that of all.
    """

    labels: tuple[Ids, ...]
    shared: tuple[Beginning, ...]

    @classmethod
    def of(cls, labels: Sequence[Sequence[int]]) -> LabelTree:
        """Return the tree of labels. Raises InvalidRequestError if their tokens are no answer to
        which label is meant."""
        ids = tuple(map(tuple, labels))
        counts = Counter(label[:end] for label in ids for end in range(len(label) + 1))
        if any(counts[label] > 1 for label in ids) or () in ids:
            raise InvalidRequestError("the model's tokenizer does not tell labels apart")
        shared = [beginning for beginning, count in counts.items() if count > 1 or not beginning]
        following = {
            beginning: dict.fromkeys(
                label[len(beginning)] for label in ids if label[: len(beginning)] == beginning
            )
            for beginning in shared
        }
        return cls(ids, tuple(Beginning(each, tuple(next_)) for each, next_ in following.items()))

    def logprobs(self, told: Sequence[Mapping[int, float]]) -> list[float]:
        """Return the log-probability of each label.

        Args:
            told: of each shared beginning the log-probabilities of the tokens that follow.
        """
        by_beginning = {each.ids: values for each, values in zip(self.shared, told, strict=True)}
        return [
            sum(
                by_beginning[label[:end]][token]
                for end, token in enumerate(label)
                if label[:end] in by_beginning
            )
            for label in self.labels
        ]
