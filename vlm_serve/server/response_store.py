"""Answers of /v1/responses that clients may come back to, in memory and for a while.

Conversations grow by turns that share their past, so every turn is held, and counted, once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vlm_serve.server.failover.attempt import Attempt, new_token

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose responses they are.

    Attributes:
        key: digest of the API key; empty if the server has none.
        salt: of the requests.
    """

    key: bytes
    salt: str


@dataclass(slots=True, eq=False)
class Turn:
    """What one request added to a conversation.

    Attributes:
        parent: the turn that it continues.
        given: the request's input items.
        answer: the response's body, with its output items.
        num_bytes: memory that the items and the answer take.
        holders: stored responses and turns that need this one.
    """

    parent: Turn | None
    given: list[Item]
    answer: dict[str, Any]
    num_bytes: int
    holders: int = 0

    def past(self) -> list[Item]:
        """The items that the answer was made from, the oldest first."""
        turns = list(_line(self))[::-1]
        return [
            item
            for turn in turns
            for item in (turn.given if turn is self else turn.given + turn.answer["output"])
        ]

    @property
    def total_bytes(self) -> int:
        """With the turns before it."""
        return sum(turn.num_bytes for turn in _line(self))


def _line(turn: Turn | None) -> Iterator[Turn]:
    while turn is not None:
        yield turn
        turn = turn.parent


@dataclass(slots=True)
class _Stored:
    salt: str
    turn: Turn
    expiry: asyncio.TimerHandle


@dataclass(slots=True)
class _Account:
    """What is stored for one key."""

    responses: dict[str, _Stored] = field(default_factory=dict)
    num_bytes: int = 0

    def hold(self, turn: Turn | None) -> None:
        for each in _line(turn):
            each.holders += 1
            if each.holders > 1:
                return
            self.num_bytes += each.num_bytes

    def release(self, turn: Turn | None) -> None:
        for each in _line(turn):
            each.holders -= 1
            if each.holders:
                return
            self.num_bytes -= each.num_bytes


class ResponseStore:
    """Everything runs on the event loop, but `find` may be called from any thread.

    Args:
        max_bytes: for all responses of one key.
        ttl: seconds that a response is kept.
    """

    def __init__(self, max_bytes: int, ttl: float) -> None:
        self.max_bytes = max_bytes
        self._ttl = ttl
        self._accounts: dict[bytes, _Account] = {}

    def num_bytes(self, key: bytes) -> int:
        """What is held for a key."""
        account = self._accounts.get(key)
        return 0 if account is None else account.num_bytes

    def find(self, owner: Owner, response_id: str) -> Turn | None:
        """The turn of a response, None if its owner has none of that id."""
        account = self._accounts.get(owner.key)
        stored = account and account.responses.get(response_id)
        return stored.turn if stored and stored.salt == owner.salt else None

    def put(self, owner: Owner, response_id: str, turn: Turn) -> None:
        """Stores a response. The key's oldest ones make room for it; it is gone at once if it is
        too large by itself."""
        expiry = asyncio.get_running_loop().call_later(self._ttl, self.delete, owner, response_id)
        account = self._accounts.setdefault(owner.key, _Account())
        account.responses[response_id] = _Stored(owner.salt, turn, expiry)
        account.hold(turn)
        while account.num_bytes > self.max_bytes:
            self._drop(account, next(iter(account.responses)))

    def delete(self, owner: Owner, response_id: str) -> bool:
        """Forgets a response, but not the part that later turns continue. False if the owner has
        none of that id."""
        if self.find(owner, response_id) is None:
            return False
        self._drop(self._accounts[owner.key], response_id)
        return True

    def clear(self) -> None:
        """Forgets the responses of all keys."""
        for account in self._accounts.values():
            for response_id in list(account.responses):
                self._drop(account, response_id)
        self._accounts.clear()

    @staticmethod
    def _drop(account: _Account, response_id: str) -> None:
        stored = account.responses.pop(response_id)
        stored.expiry.cancel()
        account.release(stored.turn)


def new_response_id(attempt: Attempt | None = None) -> str:
    """128 random bits, or what an attempt makes of its seed: nobody finds another's by trying."""
    return f"resp_{new_token(attempt, 'response', size=16)}"


def memory_of(value: Any) -> int:
    """Bytes that parsed JSON takes in memory; what is in it twice counts twice."""
    return sum(map(sys.getsizeof, parts_of(value)))


def parts_of(value: Any) -> Iterator[Any]:
    """Parsed JSON and everything in it, keys included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        yield each
        if isinstance(each, dict):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
