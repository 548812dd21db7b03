"""A replica and an answer as a router is told of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica that may be chosen.

    Attributes:
        id: names it, the same in every router.
        load: tokens queued and running there, as last reported.
    """

    id: str
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class Spent:
    """What a request has turned out to be.

    Attributes:
        prompt_tokens: of its prompts.
        cached_tokens: of those, the ones that the replica need not compute.
        answer_tokens: of all its answers.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int

    @property
    def computed(self) -> int:
        """Tokens that a replica has computed for it."""
        return max(0, self.prompt_tokens - self.cached_tokens) + self.answer_tokens
