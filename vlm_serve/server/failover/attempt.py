"""What is fixed before one of several replicas is asked, so that another one can go on with the
answer: all that would be random or dated, and what has been delivered.

An `Attempt` stands in the ASGI scope under `ATTEMPT`, and nothing that a client sends comes there.
Whoever asks replicas makes the first one (`Attempt.first`), notes the messages that it passes on
(`Delivery`), and asks another replica with `Delivery.next` when one has died.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

ATTEMPT = "vlm_serve.attempt"
"""Key of the ASGI scope."""

TOKENS = "vlm_serve.tokens"
USAGE = "vlm_serve.usage"
REPORT = "vlm_serve.cache_report"
FAILURE = "vlm_serve.failure"
"""Keys of a replica's messages `http.response.body`: {choice: [token ids that the message's bytes
cover]}; the prompts' counts and cache reports up to there; whether the message tells of a failure.
Each is left out where there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to answer a request. Plain data: it can be pickled, and needs no model to be read.

    Attributes:
        seed: of all draws, 62 random bits that nobody else knows; a request's own seed comes first.
        request_id: every id of the answer that the client does not give is made of it and the seed.
        created: Unix time in seconds that the answer bears.
        deadline: Unix time at which it is too late for the answer; None: the replica's own limit.
        tokens: of each choice (prompt * n + choice) those that have been delivered.
        delivered: bytes of the response's body that have been delivered.
        usage, cache_report: of each prompt, as far as the attempts before had told them.
        resumed: attempts before this one.
        deaths: of them those whose replica died; the others were moved in time.
        started: the response's status and headers have been delivered.
    """

    seed: int
    request_id: str
    created: int
    deadline: float | None = None
    tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    delivered: int = 0
    usage: tuple[Mapping[str, int] | None, ...] | None = None
    cache_report: tuple[Mapping[str, Any] | None, ...] | None = None
    resumed: int = 0
    deaths: int = 0
    started: bool = False

    @classmethod
    def first(cls, request_id: str, deadline: float | None = None) -> Attempt:
        return cls(secrets.randbits(62), request_id, int(time.time()), deadline)

    def token(self, *place: object, size: int = 12) -> str:
        """Hexadecimal text of `size` bytes that is another one for every place of the answer, and
        the same in every attempt. Nobody who does not know the seed can tell it."""
        text = repr((self.request_id, *place)).encode()
        key = self.seed.to_bytes(8, "little", signed=True)
        return hashlib.blake2b(text, digest_size=size, key=key).hexdigest()


def attempt_of(scope: Mapping[str, Any]) -> Attempt | None:
    """The attempt that a request with this ASGI scope is; None: nobody will make another one."""
    attempt = scope.get(ATTEMPT)
    assert attempt is None or isinstance(attempt, Attempt), "only our own code sets it"
    return attempt


def created_of(scope: Mapping[str, Any]) -> int:
    """Unix time in seconds that the answer to the request with this ASGI scope bears."""
    attempt = attempt_of(scope)
    return int(time.time()) if attempt is None else attempt.created


def new_token(attempt: Attempt | None, *place: object, size: int = 12) -> str:
    """Letters for an id, see `Attempt.token`; random ones if there will be no other attempt."""
    return secrets.token_hex(size) if attempt is None else attempt.token(*place, size=size)


def merged(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several messages `http.response.body` in a row as one; at least one is given."""
    tokens: dict[int, list[int]] = {}
    one: dict[str, Any] = {}
    for message in messages:
        one |= message
        for choice, ids in message.get(TOKENS, {}).items():
            tokens.setdefault(choice, []).extend(ids)
    one["body"] = b"".join(message.get("body", b"") for message in messages)
    return one | ({TOKENS: tokens} if tokens else {})


class Delivery:
    """What has been passed on of the answer of an attempt.

    Args:
        attempt: of which the messages are.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._started = attempt.started
        self._delivered = attempt.delivered
        self._usage, self._report = attempt.usage, attempt.cache_report
        self._tokens = {choice: list(ids) for choice, ids in attempt.tokens.items()}

    def passed(self, message: Mapping[str, Any]) -> None:
        """The message has been passed on whole."""
        self._started = True
        self._delivered += len(message.get("body", b""))
        for choice, ids in message.get(TOKENS, {}).items():
            self._tokens.setdefault(choice, []).extend(ids)
        self._usage = message.get(USAGE, self._usage)
        self._report = message.get(REPORT, self._report)

    @property
    def next(self) -> Attempt:
        """The attempt that goes on where this one ends because its replica has died."""
        return replace(self.moved, deaths=self._attempt.deaths + 1)

    @property
    def moved(self) -> Attempt:
        """The attempt that goes on where this one ends because its replica ends in order."""
        return replace(
            self._attempt,
            tokens={choice: tuple(ids) for choice, ids in self._tokens.items()},
            delivered=self._delivered,
            usage=self._usage,
            cache_report=self._report,
            resumed=self._attempt.resumed + 1,
            started=self._started,
        )


def tokens_of(attempt: Attempt, prompt: int, choices: int) -> tuple[Sequence[int], ...]:
    """What the choices of a prompt begin with."""
    first = prompt * choices
    return tuple(attempt.tokens.get(first + index, ()) for index in range(choices))
