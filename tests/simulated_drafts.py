"""Drafts in the simulation: right ones, but for mistakes."""

from __future__ import annotations

import random

from symbolic import VOCABULARY, chain, extended, next_token

from vlm_serve.engine.features.drafts.base import Drafter, MtpDrafter
from vlm_serve.engine.requests.sequence import Sequence


class Guesser:
    """Drafts what will come, but for mistakes. What it knows follows from its own seed, so that the
    traffic is the same without it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"drafts {seed}")
        self.most = self._rng.choice([1, 3, 7])
        self._rate = self._rng.choice([0.0, 0.7, 1.0])
        self._digests: dict[int, tuple[int, bytes]] = {}

    def company(self) -> list[Drafter]:
        """Itself, drafts of the model's own layer, or both."""
        return self._rng.choice([[self], [MtpDrafter()], [self, MtpDrafter()]])

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        rng, tokens = self._rng, sequence.token_ids
        if sequence.number in self._digests:
            known, digest = self._digests[sequence.number]
        else:
            known = len(sequence.prompt)
            digest = chain(sequence.info.positions, sequence.prompt.token_ids)[-1]
        for token in tokens[known:]:
            digest = extended(digest, token)
        self._digests[sequence.number] = len(tokens), digest
        drafts: list[int] = []
        for _ in range(rng.randint(0, limit)):
            right = next_token(digest, sequence.info.seed)
            drafts.append(right if rng.random() < self._rate else rng.randrange(VOCABULARY))
            digest = extended(digest, drafts[-1])
        return tuple(drafts)

    def evidence(self, sequence: Sequence) -> int:
        return 0

    def forget(self, sequence: Sequence) -> None:
        self._digests.pop(sequence.number, None)
