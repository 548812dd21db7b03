"""Records of the prompts of earlier answers, with which later requests are compared.

A record has digests alone. It belongs to the answer's owner: of another's id nothing is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from vlm_serve.preprocess.identity.prompt_parts import PromptParts
from vlm_serve.server.http.auth import Owner

MAX_RECORDS = 1024
"""Records of one API key; without keys, of all clients together."""
KEPT_SECONDS = 3600.0


class PromptRecord(NamedTuple):
    """The prompt of an earlier answer.

    Attributes:
        parts: what it was made of.
        reusable: number of its tokens that the cache had when it had been computed.
        salt: of its owner.
        since: when it was recorded, in seconds.
    """

    parts: PromptParts
    reusable: int
    salt: str
    since: float


class PromptRecords:
    """Bounded memory of prompts by the ids of their answers; the oldest are dropped.

    It is used on the event loop; only `find` is thread-safe.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[bytes, dict[str, PromptRecord]] = {}

    def find(self, owner: Owner, answer_id: str) -> PromptRecord | None:
        """Return the record of an owner's answer; None: there is none, or it is too old."""
        found = self._accounts.get(owner.key, {}).get(answer_id)
        known = found and found.salt == owner.salt and found.since >= self._clock() - KEPT_SECONDS
        return found if known else None

    def put(self, owner: Owner, answer_id: str, parts: PromptParts, reusable: int) -> None:
        """Record an answer's prompt, and drop records that are too old or too many."""
        now, account = self._clock(), self._accounts.setdefault(owner.key, {})
        account.pop(answer_id, None)
        account[answer_id] = PromptRecord(parts.kept(), reusable, owner.salt, now)
        while len(account) > MAX_RECORDS or next(iter(account.values())).since < now - KEPT_SECONDS:
            del account[next(iter(account))]

    def clear(self) -> None:
        """Drop all."""
        self._accounts.clear()
