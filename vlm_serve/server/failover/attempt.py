"""Attempts: data for continuing an answer on another replica.

An attempt fixes everything random or dated before a replica gets the request, and keeps the
delivered part. It stands in the ASGI scope under `ATTEMPT`, where no client can write.

The sender of a request makes the first attempt (`Attempt.first`) and records the messages on their
way to the client (`Delivery`). When the replica dies, it sends `Delivery.next` to another one.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

ID_BYTES = 16
"""Random part of every id: without API keys it is all that protects a stored answer."""
ATTEMPT = "vlm_serve.attempt"
"""Key of the ASGI scope."""

TOKENS = "vlm_serve.tokens"
USAGE = "vlm_serve.usage"
REPORT = "vlm_serve.cache_report"
FAILURE = "vlm_serve.failure"
DIAGNOSIS = "vlm_serve.diagnosis"
PING = "vlm_serve.ping"
"""Keys of a replica's messages `http.response.body`; each is left out where it would be empty.

TOKENS: {choice: [token ids covered by the message's bytes]}. USAGE, REPORT: of each prompt, so far.
DIAGNOSIS: what comparing the request with an earlier one has shown.
FAILURE: the message reports a failure. PING: it breaks a silence, or tells a prompt's progress, and
is no part of the answer.
"""


class Diagnosis(NamedTuple):
    """The result of comparing a request with an earlier one, see `api/shared/comparison.py`.

    Attributes:
        kind: what has changed, or why that is not known; "hit": nothing is missing.
        missed: tokens that would have been reused otherwise.
        reusable: tokens of the earlier prompt that could be reused.
    """

    kind: str
    missed: int = 0
    reusable: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to answer a request. Plain data: it can be pickled, and reading it needs no model.

    Attributes:
        seed: 62 secret random bits for all draws; a request's own seed takes precedence.
        request_id: with the seed and the secret it determines every id in the answer that the
            client did not give.
        created: Unix time in seconds for the answer.
        deadline: Unix time of the request's deadline; None: the replica's own limit applies.
        tokens: tokens delivered of each choice (prompt * n + choice).
        delivered: bytes of the response's body that were delivered.
        usage, cache_report: of each prompt, as far as earlier attempts have reported them.
        diagnosis: what an earlier attempt has told of a comparison.
        resumed: number of earlier attempts.
        deaths: number of earlier attempts whose replica died; the others were moved in time.
        started: the response's status and headers have been delivered.
        secret: further 128 random bits.
    """

    seed: int
    request_id: str
    created: int
    deadline: float | None = None
    tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    delivered: int = 0
    usage: tuple[Mapping[str, int] | None, ...] | None = None
    cache_report: tuple[Mapping[str, Any] | None, ...] | None = None
    diagnosis: Diagnosis | None = None
    resumed: int = 0
    deaths: int = 0
    started: bool = False
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def first(cls, request_id: str, deadline: float | None = None) -> Attempt:
        """Make the first attempt to answer a request."""
        secret = secrets.token_bytes(ID_BYTES)
        return cls(secrets.randbits(62), request_id, int(time.time()), deadline, secret=secret)

    def token(self, *place: object) -> str:
        """Return a hexadecimal id for a place in the answer, the same in every attempt.

        It cannot be predicted without the secret.
        """
        text = repr((self.request_id, *place)).encode()
        key = self.seed.to_bytes(8, "little", signed=True) + self.secret
        return hashlib.blake2b(text, digest_size=ID_BYTES, key=key).hexdigest()


def attempt_of(scope: Mapping[str, Any]) -> Attempt | None:
    """Return the attempt in a request's ASGI scope; None: there will be no other attempt."""
    attempt = scope.get(ATTEMPT)
    assert attempt is None or isinstance(attempt, Attempt), "only our own code sets it"
    return attempt


def new_token(attempt: Attempt | None, *place: object) -> str:
    """Return letters for an id, see `Attempt.token`; without an attempt they are random."""
    return secrets.token_hex(ID_BYTES) if attempt is None else attempt.token(*place)


def merged(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge consecutive messages `http.response.body`, at least one, into one.

    What only breaks a silence is left out beside others.
    """
    messages = [message for message in messages if not message.get(PING)] or messages[-1:]
    tokens: dict[int, list[int]] = {}
    one: dict[str, Any] = {}
    for message in messages:
        one |= message
        for choice, ids in message.get(TOKENS, {}).items():
            tokens.setdefault(choice, []).extend(ids)
    one["body"] = b"".join(message.get("body", b"") for message in messages)
    return one | ({TOKENS: tokens} if tokens else {})


class Delivery:
    """Record of the delivered messages of an attempt's answer.

    Args:
        attempt: the attempt whose messages they are.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._started = attempt.started
        self._delivered = attempt.delivered
        self._usage, self._report = attempt.usage, attempt.cache_report
        self._diagnosis = attempt.diagnosis
        self._tokens = {choice: list(ids) for choice, ids in attempt.tokens.items()}

    def passed(self, message: Mapping[str, Any]) -> None:
        """Record a message after it was passed on whole."""
        self._started = True
        self._delivered += 0 if message.get(PING) else len(message.get("body", b""))
        for choice, ids in message.get(TOKENS, {}).items():
            self._tokens.setdefault(choice, []).extend(ids)
        self._usage = message.get(USAGE, self._usage)
        self._report = message.get(REPORT, self._report)
        self._diagnosis = message.get(DIAGNOSIS, self._diagnosis)

    @property
    def next(self) -> Attempt:
        """The next attempt after the replica died."""
        return replace(self.moved, deaths=self._attempt.deaths + 1)

    @property
    def moved(self) -> Attempt:
        """The next attempt while the replica shuts down in order."""
        return replace(
            self._attempt,
            tokens={choice: tuple(ids) for choice, ids in self._tokens.items()},
            delivered=self._delivered,
            usage=self._usage,
            cache_report=self._report,
            diagnosis=self._diagnosis,
            resumed=self._attempt.resumed + 1,
            started=self._started,
        )
