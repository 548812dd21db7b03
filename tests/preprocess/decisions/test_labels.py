"""Labels, and the tokens that tell them apart."""

from __future__ import annotations

import math
import random

import pytest

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.decisions.labels import Ids, LabelTree, labels_of


def test_labels_have_one_length() -> None:
    assert labels_of("predicate", 2) == ("Yes", "No")
    assert labels_of("score", 3) == ("A", "B", "C")
    assert labels_of("choice", 26)[-1] == "Z"
    many = labels_of("choice", 255)
    assert many[:2] == ("AA", "AB") and many[-1] == "JU" and len(set(many)) == 255


def test_only_shared_beginnings_are_asked_for() -> None:
    tree = LabelTree.of([(1, 2, 3), (1, 4), (5, 6, 7)])
    assert {each.ids: each.following for each in tree.shared} == {(): (1, 5), (1,): (2, 4)}
    told = [{1: -0.5, 5: -1.0}, {2: -0.25, 4: -2.0}]
    assert tree.logprobs(told) == [-0.75, -2.5, -1.0]


@pytest.mark.parametrize("seed", range(20))
def test_probabilities_of_labels_that_share_all_beginnings_add_up(seed: int) -> None:
    """Let every token follow each beginning: one of the labels must come."""
    rng = random.Random(seed)

    def grown(beginning: Ids) -> list[Ids]:
        if len(beginning) == 4 or (beginning and rng.random() < 0.4):
            return [beginning]
        return [label for token in (1, 2, 3) for label in grown((*beginning, token))]

    tree = LabelTree.of(grown(()))
    told = []
    for each in tree.shared:
        weights = {token: rng.random() + 0.1 for token in each.following}
        told.append({token: math.log(w / sum(weights.values())) for token, w in weights.items()})
    assert sum(map(math.exp, tree.logprobs(told))) == pytest.approx(1)


@pytest.mark.parametrize("labels", [[(1,), (1, 2)], [(1, 2), (1, 2)], [(1,), ()]])
def test_labels_that_nothing_tells_apart_are_refused(labels: list[Ids]) -> None:
    with pytest.raises(InvalidRequestError, match="does not tell labels apart"):
        LabelTree.of(labels)
