"""Stored answers of /v1/responses, kept in memory for a limited time.

Turns of a conversation share their past, so every turn is held and counted once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from vlm_serve.server.failover.attempt import Attempt, new_token
from vlm_serve.server.http.auth import Owner

Item = dict[str, Any]
MAX_RESPONSES = 4096
"""Of one key: an unknown item is searched for in all of them."""
ALL_KEYS = 4
"""The responses of all keys together may be so many times as large as those of one."""
RECORD_BYTES = 1200
"""Memory of a stored response beside its turn: ids, holders and the timer of its end."""


@dataclass(slots=True, eq=False)
class Turn:
    """The part of a conversation added by one request.

    Attributes:
        parent: the turn that it continues; None: it is the first one.
        given: the request's input items.
        answer: the response's body, with its output items.
        num_bytes: memory of the items and the answer.
        holders: number of stored responses and turns that refer to this one.
        name: id of its stored response, if any.
    """

    parent: Turn | None
    given: list[Item]
    answer: dict[str, Any]
    num_bytes: int
    holders: int = 0
    name: str | None = None

    def past(self) -> list[Item]:
        """Return the input items of the answer, the oldest first."""
        turns = list(_line(self))[::-1]
        return [
            item
            for turn in turns
            for item in (turn.given if turn is self else turn.given + turn.answer["output"])
        ]

    @property
    def total_bytes(self) -> int:
        """Memory of this turn and all earlier ones."""
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
    """Stored responses of one API key."""

    responses: dict[str, _Stored] = field(default_factory=dict)
    num_bytes: int = 0

    def hold(self, turn: Turn | None) -> None:
        for ancestor in _line(turn):
            ancestor.holders += 1
            if ancestor.holders > 1:
                return
            self.num_bytes += ancestor.num_bytes

    def release(self, turn: Turn | None) -> None:
        for ancestor in _line(turn):
            ancestor.holders -= 1
            if ancestor.holders:
                return
            self.num_bytes -= ancestor.num_bytes


class ResponseStore:
    """Store of responses, for each API key. It is used on the event loop; only `find` and
    `find_items` are thread-safe.

    Args:
        max_bytes: limit for all responses of one key, of all keys `ALL_KEYS` times as much; the
            newest answer may exceed it.
        ttl: seconds that a response is kept.
    """

    def __init__(self, max_bytes: int, ttl: float) -> None:
        self.max_bytes = max_bytes
        self._ttl = ttl
        self._accounts: dict[bytes, _Account] = {}

    def num_bytes(self, key: bytes) -> int:
        """Return the bytes held for a key."""
        account = self._accounts.get(key)
        return 0 if account is None else account.num_bytes

    @property
    def held_bytes(self) -> int:
        """Memory of the responses of all keys, with their records."""
        accounts = self._accounts.values()
        return sum(each.num_bytes + len(each.responses) * RECORD_BYTES for each in accounts)

    def find(self, owner: Owner, response_id: str) -> Turn | None:
        """Return the turn of a response; None: the owner has none of that id."""
        account = self._accounts.get(owner.key)
        stored = account and account.responses.get(response_id)
        return stored.turn if stored and stored.salt == owner.salt else None

    def find_items(self, owner: Owner, wanted: Collection[str]) -> dict[str, Item]:
        """Return the items of these ids in an owner's stored conversations, the newest first.

        Without a key or salt an id is the only secret. Clients may have chosen those of their own
        items, so then only items of answers are found.
        """
        alone = bool(owner.key or owner.salt)
        account, matches = self._accounts.get(owner.key), dict[str, Item]()
        seen: set[Turn] = set()
        # `list` copies the entries at once, while the event loop may change them.
        for stored in reversed([] if account is None else list(account.responses.values())):
            if stored.salt != owner.salt:
                continue
            for turn in _line(stored.turn):
                if turn in seen or len(matches) == len(wanted):
                    break
                seen.add(turn)
                for item in (*turn.answer["output"], *(turn.given if alone else ())):
                    if item.get("id") in wanted:
                        matches.setdefault(item["id"], item)
        return matches

    def put(self, owner: Owner, response_id: str, turn: Turn) -> None:
        """Store a response.

        The key's oldest responses whose memory no later turn holds are dropped for it, then those
        of the keys with the most. It is kept itself, since its client has been told so, even if its
        answer exceeds the limit.
        """
        expiry = asyncio.get_running_loop().call_later(self._ttl, self.delete, owner, response_id)
        account = self._accounts.setdefault(owner.key, _Account())
        account.responses[response_id] = _Stored(owner.salt, turn, expiry)
        turn.name = response_id
        account.hold(turn)
        self._shrink(account, self.max_bytes, turn)
        excess = sum(map(attrgetter("num_bytes"), self._accounts.values()))
        excess -= ALL_KEYS * self.max_bytes
        if excess <= 0:
            return
        for each in sorted(self._accounts.values(), key=attrgetter("num_bytes"), reverse=True):
            before = each.num_bytes
            self._shrink(each, before - excess, turn)
            excess -= before - each.num_bytes
            if excess <= 0:
                return

    def _shrink(self, account: _Account, limit: int, turn: Turn) -> None:
        """Drop an account's oldest responses down to the limit, but not this turn."""
        for stored in list(account.responses.values()):
            freed: Turn | None = stored.turn
            while freed and freed.name and freed is not turn and freed.holders == 1:
                if account.num_bytes <= limit and len(account.responses) <= MAX_RESPONSES:
                    return
                parent = freed.parent
                self._drop(account, freed.name)
                freed = next((each for each in _line(parent) if each.name), None)

    def delete(self, owner: Owner, response_id: str) -> bool:
        """Delete a response, except for turns that later ones continue.

        Return False if the owner has none of that id.
        """
        if self.find(owner, response_id) is None:
            return False
        self._drop(self._accounts[owner.key], response_id)
        return True

    def clear(self) -> None:
        """Delete the responses of all keys."""
        for account in self._accounts.values():
            for response_id in list(account.responses):
                self._drop(account, response_id)
        self._accounts.clear()

    @staticmethod
    def _drop(account: _Account, response_id: str) -> None:
        stored = account.responses.pop(response_id)
        stored.turn.name = None
        stored.expiry.cancel()
        account.release(stored.turn)


def new_response_id(attempt: Attempt | None = None) -> str:
    """Return an id of 128 random bits; an attempt derives them from its seed."""
    return f"resp_{new_token(attempt, 'response')}"


def memory_of(value: Any) -> int:
    """Return the bytes of parsed JSON in memory; shared objects count each time."""
    return sum(map(sys.getsizeof, parts_of(value)))


def parts_of(value: Any) -> Iterator[Any]:
    """Yield a parsed JSON value and all values and keys in it."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, dict):
            waiting += part.keys()
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
