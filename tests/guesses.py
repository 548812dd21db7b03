"""Drafts for tests and measurements: what is known to come, with mistakes."""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.drafts.drafting import Drafting
from vlm_serve.engine.features.drafts.lengths import CostCurve
from vlm_serve.engine.requests.sequence import Sequence

Made = dict[tuple[int, ...], tuple[int, ...]]
"""The drafts behind the tokens of a sequence."""


class Oracle:
    """Drafts the answers that it was told, each token with some chance a wrong one.

    Args:
        seed: of the mistakes.
        mistakes: share of them.
        vocabulary: wrong tokens are below.
    """

    def __init__(self, seed: int, *, mistakes: float, vocabulary: int) -> None:
        self.answers: dict[tuple[tuple[int, ...], int], Tokens[int]] = {}
        self._rng = random.Random(seed)
        self._mistakes = mistakes
        self._vocabulary = vocabulary

    def tell(self, prompt: Tokens[int], answers: Tokens[Tokens[int]]) -> None:
        """What the choices of a prompt are going to be."""
        for index, answer in enumerate(answers):
            self.answers[tuple(prompt), index] = answer

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        answer = self.answers.get((sequence.prompt.token_ids, sequence.index), ())
        at, rng = sequence.num_generated, self._rng
        return tuple(
            rng.randrange(self._vocabulary) if rng.random() < self._mistakes else token
            for token in answer[at : at + limit]
        )

    def evidence(self, sequence: Sequence) -> int:
        return 0

    def forget(self, sequence: Sequence) -> None:
        pass


def consult(engine: Engine, oracle: Oracle) -> None:
    """Has an engine made with drafts ask an oracle first, and take all that there are."""
    draft_freely(engine)
    drafting = engine._features.get(Drafting)
    assert drafting is not None
    drafting.drafters.insert(0, oracle)


def draft_freely(engine: Engine) -> None:
    """Takes all drafts for worth it, as if rows and the model's layer cost a step nothing."""
    drafting = engine._features.get(Drafting)
    assert drafting is not None
    drafting.costs = CostCurve()
    drafting.payoff_probe = None


def drafts_of(engine: Engine) -> Made:
    """Notes from now on what is drafted behind which tokens."""
    drafting, made = engine._features.get(Drafting), Made()
    assert drafting is not None
    take = drafting.take

    def noting(sequence: Sequence, drafts: tuple[int, ...]) -> None:
        made[tuple(sequence.token_ids)] = drafts
        take(sequence, drafts)

    drafting.take = noting  # type: ignore[method-assign]
    return made
