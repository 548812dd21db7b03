"""Chooses replicas for requests: what they would have to compute, times what they have been given.

A router works alone. It knows the digests that replicas publish, what it has sent itself since and
what that has cost, and the loads that it is told. Several routers agree where it matters by
rendezvous hashing: each prefix has a home, to which it goes unless another replica has it or the
home has been given too much.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_serve.preprocess.affinity import KEY_BYTES, MAX_KEYS, AffinityDigest, place_of
from vlm_serve.routing.holdings import Digests, Sent
from vlm_serve.routing.loads import Loads
from vlm_serve.routing.rendezvous import Rendezvous
from vlm_serve.routing.sizes import Sizes
from vlm_serve.routing.view import ReplicaView, Spent

_log = logging.getLogger(__name__)

_MAX_FACTOR = 500.0
"""The exponential of it is a number."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What counts how much. A replica's price for a request is the tokens that it would have to
    compute, times the exponential of the work that it has been given of late and of its place among
    the homes of the request's prefix.

    Attributes:
        work_weight: of the tokens given to a replica of late. The unit is what all have got on
            average and twice the whole request: where little is done, little is to be evened out,
            and of large requests routers rather agree where they are at home.
        home_weight: of a place in the order of a prefix's homes.
        load_weight: of a token that a replica has to do now, as if it were to be computed too.
        homes: replicas that a prefix is at home on; all others share the place behind them.
        answer_tokens: that answers are taken to have before any has ended.
        memory_seconds: see `Loads`.
        sent_seconds: so long a prefix counts as held where it was sent to, digest or not.
    """

    work_weight: float = 4.0
    home_weight: float = 0.35
    load_weight: float = 0.02
    homes: int = 2
    answer_tokens: float = 128.0
    memory_seconds: float = 10.0
    sent_seconds: float = 10.0


class Router:
    """One of any number of routers. Nothing in it raises, and nothing in it waits.

    What it holds is bounded: `MAX_ALL_ENTRIES` entries of digests, `MAX_SENT_KEYS` keys of its own
    requests with `MAX_SENT_REPLICAS` replicas each, `MAX_OPEN_KINDS` kinds of open requests. Not
    thread-safe.

    Args:
        policy: what counts how much.
        clock: seconds.

    Attributes:
        failures: calls that went wrong inside and did less than they should have.
    """

    def __init__(
        self, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failures = 0
        self._policy = policy or Policy()
        self._clock = clock
        self._rendezvous = Rendezvous()
        self._digests = Digests()
        self._sent = Sent()
        self._loads = Loads(self._policy.memory_seconds)
        self._sizes = Sizes(self._policy.answer_tokens)
        self._turn = 0

    def choose(
        self, keys: Sequence[bytes], tokens: int, replicas: Sequence[ReplicaView]
    ) -> list[str]:
        """Ids of all replicas, the best one first.

        Args:
            keys: the request's affinity keys, longest prefix first.
            tokens: of its prompt, if that is known; 0: as many as its keys say.
            replicas: those that may be chosen.
        """
        try:
            return self._choose(_valid(keys), tokens, _loads_of(replicas))
        except Exception:
            self._failed()
        self._turn += 1
        try:
            ids = list(_loads_of(replicas))
            turn = self._turn % len(ids)
            return ids[turn:] + ids[:turn]
        except Exception:
            return []

    def sent(self, replica_id: str, keys: Sequence[bytes], tokens: int) -> None:
        """A request goes to a replica. Arguments as of `choose`."""
        try:
            keys, now = _valid(keys), self._clock()
            length = self._length(keys, tokens)
            held = self._reuse(keys, length, {replica_id}, now).get(replica_id, 0.0)
            self._loads.know([replica_id])
            work = length - held + self._sizes.answer
            self._loads.sent(replica_id, keys[0] if keys else b"", work, now)
            self._sent.add(replica_id, keys, now)
        except Exception:
            self._failed()

    def ended(
        self,
        replica_id: str,
        keys: Sequence[bytes] = (),
        tokens: int = 0,
        spent: Spent | None = None,
    ) -> None:
        """A request that was sent has ended, in whichever way.

        Args:
            spent: what it has turned out to be, if that is known. What was expected of it is
                corrected, and what will be expected of others like it.
        """
        try:
            keys, now = _valid(keys), self._clock()
            kind = keys[0] if keys else b""
            if not isinstance(spent, Spent):
                self._loads.ended(replica_id, kind, now)
                return
            self._loads.ended(replica_id, kind, now, spent.computed)
            if keys:
                self._sizes.learn(kind, spent.prompt_tokens, spent.answer_tokens)
        except Exception:
            self._failed()

    def digest(self, replica_id: str, digest: AffinityDigest) -> None:
        """What a replica holds now."""
        try:
            self._digests.replace(replica_id, digest.entries)
        except Exception:
            self._failed()

    def removed(self, replica_id: str) -> None:
        """A replica is gone, with all that it held."""
        try:
            self._digests.remove(replica_id)
            self._sent.remove(replica_id)
            self._loads.remove(replica_id)
        except Exception:
            self._failed()

    def _failed(self) -> None:
        if not self.failures:
            _log.exception("a router's call failed; it goes on without, and further ones are mute")
        self.failures += 1

    def _choose(self, keys: list[bytes], tokens: int, loads: dict[str, float]) -> list[str]:
        if len(loads) < 2:
            return list(loads)
        policy, now = self._policy, self._clock()
        length = self._length(keys, tokens)
        self._loads.know(loads)
        saved = self._reuse(keys, length, set(loads), now)
        ranks = self._rendezvous.weights(self._home_key(keys), loads)
        homes = heapq.nlargest(policy.homes, ranks, key=ranks.__getitem__)
        places = {home: place for place, home in enumerate(homes)}
        answer = self._sizes.answer
        works, growth = self._loads.works(now)
        unit = sum(map(works.__getitem__, loads)) / len(loads)
        unit += 2 * max(1.0, length + answer) * growth
        waiting, prices = self._loads.open, dict[str, tuple[float, int]]()
        for replica, load in loads.items():
            compute = length - saved.get(replica, 0.0) + answer
            compute += policy.load_weight * max(load, waiting(replica))
            factor = policy.work_weight * works[replica] / unit
            factor += policy.home_weight * places.get(replica, len(homes))
            prices[replica] = (compute * math.exp(min(factor, _MAX_FACTOR)), -ranks[replica])
        return sorted(prices, key=prices.__getitem__)

    def _length(self, keys: list[bytes], tokens: Any) -> float:
        """Tokens of a request. If nobody has counted them: what its keys say, or somebody who has
        computed the beginning of it."""
        if isinstance(tokens, int) and tokens > 0:
            return tokens
        if not keys:
            return 0
        for key in keys:
            held = self._digests.holders(key)
            if held:
                rest = max(0, place_of(keys[0]).tokens - place_of(key).tokens)
                return next(iter(held.values())) + rest * self._sizes.factor(keys[0])
        return self._sizes.guess(keys[0])

    def _reuse(
        self, keys: list[bytes], tokens: float, ids: set[str], now: float
    ) -> dict[str, float]:
        """Tokens of a request that replicas need not compute, as far as is known."""
        found: dict[str, float] = {}
        share = tokens / max(1, place_of(keys[0]).tokens) if keys else 0.0
        since = now - self._policy.sent_seconds
        missing = set(ids)
        for key in keys:
            if not missing:
                break
            held = self._digests.holders(key)
            for replica in missing & held.keys():
                found[replica] = min(float(held[replica]), tokens)
            missing -= found.keys()
            times = self._sent.holders(key)
            if times:
                expected = min(place_of(key).tokens * share, tokens)
                for replica in missing & times.keys():
                    if times[replica] >= since:
                        found[replica] = expected
                missing -= found.keys()
        return found

    def _home_key(self, keys: list[bytes]) -> bytes:
        """The key by which a request has a home.

        Its prefix ends with the first medium; without media where half of all has been said.
        """
        if not keys:
            self._turn += 1
            return self._turn.to_bytes(KEY_BYTES, "little")
        whole = place_of(keys[0]).tokens
        for key in reversed(keys):
            place = place_of(key)
            if place.media or 2 * place.tokens >= whole:
                break
        return key


def _valid(keys: Any) -> list[bytes]:
    return [key for key in keys or () if isinstance(key, bytes) and len(key) == KEY_BYTES][
        :MAX_KEYS
    ]


def _loads_of(replicas: Iterable[ReplicaView]) -> dict[str, float]:
    """What is known of each replica; one without an id cannot be chosen."""
    loads: dict[str, float] = {}
    for each in replicas:
        name, load = getattr(each, "id", None), getattr(each, "load", None)
        if isinstance(name, str):
            usable = isinstance(load, int | float) and math.isfinite(load) and load > 0
            loads[name] = float(load) if usable and load is not None else 0.0
    return loads
