"""A router's inputs: the state of a replica, and the usage of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A candidate replica.

    Attributes:
        id: its name, the same in every router.
        load: tokens queued and running there, as last reported.
    """

    id: str
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """Token counts of an ended request.

    Attributes:
        prompt_tokens: of all its prompts.
        cached_tokens: prompt tokens reused from the cache.
        answer_tokens: of all its answers.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int

    @property
    def computed(self) -> int:
        """Tokens computed for the request."""
        return max(0, self.prompt_tokens - self.cached_tokens) + self.answer_tokens
