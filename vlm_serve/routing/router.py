"""Chooses replicas for requests by the tokens to compute, weighted by the work assigned so far.

A router works alone. It knows the published digests, the requests it has sent since with their
cost, and the reported loads. Rendezvous hashing lets routers agree without talking: each prefix has
a home replica, unless another one has it cached or the home is overloaded.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_serve.preprocess.identity.affinity import (
    KEY_BYTES,
    MAX_KEYS,
    AffinityDigest,
    AffinityKey,
    place_of,
)
from vlm_serve.routing.holdings import Digests, SentPrefixes
from vlm_serve.routing.view import ReplicaView, RequestUsage

_log = logging.getLogger(__name__)

_MAX_FACTOR = 500.0
"""Bound on the exponent: its exponential is finite."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights of a replica's price for a request.

    The price is the tokens to compute times an exponential. The exponent grows with the work
    assigned recently and with the replica's rank among the homes of the request's prefix.

    Attributes:
        work_weight: of recent tokens. Their unit is the replicas' average plus twice the whole
            request. So balancing weighs little when there is little work, and for large requests
            the home counts for more.
        home_weight: per rank among a prefix's homes.
        load_weight: of a token of current load, relative to a token to compute.
        homes: home replicas per prefix; all others share the rank behind them.
        answer_tokens: initial estimate of an answer's length.
        memory_seconds: see `Loads`.
        sent_seconds: for so long a prefix counts as cached where it was sent, digest or not, beside
            the time in which a request with it is open.
    """

    work_weight: float = 4.0
    home_weight: float = 0.35
    load_weight: float = 0.02
    homes: int = 2
    answer_tokens: float = 128.0
    memory_seconds: float = 10.0
    sent_seconds: float = 10.0


class Router:
    """One of any number of routers. No method raises or blocks. Not thread-safe.

    Its memory is bounded: `MAX_ALL_ENTRIES` digest entries, `MAX_SENT_KEYS` keys of its own
    requests with `MAX_SENT_REPLICAS` replicas each, `MAX_OPEN_KINDS` kinds of open requests.

    Args:
        policy: weights.
        clock: time in seconds.

    Attributes:
        failures: calls that failed inside and had no or a partial effect.
    """

    def __init__(
        self, policy: Policy | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failures = 0
        self._policy = policy or Policy()
        self._clock = clock
        self._rendezvous = RendezvousHash()
        self._digests = Digests()
        self._sent = SentPrefixes()
        self._loads = Loads(self._policy.memory_seconds)
        self._sizes = SizeEstimator(self._policy.answer_tokens)
        self._turn = 0

    def choose(
        self, keys: Sequence[bytes], tokens: int, replicas: Sequence[ReplicaView]
    ) -> list[str]:
        """Rank all candidate replicas by id, best first.

        Args:
            keys: the request's affinity keys, longest prefix first.
            tokens: length of its prompt; 0 if unknown: it is estimated from the keys.
            replicas: the candidates.
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
        """Record a request for a replica. Arguments as for `choose`."""
        try:
            keys, now = _valid(keys), self._clock()
            length = self._length(keys, tokens)
            held = self._reuse(keys, length, {replica_id}, now).get(replica_id, 0.0)
            self._loads.add_new([replica_id])
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
        usage: RequestUsage | None = None,
    ) -> None:
        """Record the end of a sent request, successful or not.

        Args:
            usage: its token counts, if known; they correct the estimates of this request and of
                similar ones.
        """
        try:
            keys, now = _valid(keys), self._clock()
            kind = keys[0] if keys else b""
            self._sent.end(replica_id, keys, now, computed=isinstance(usage, RequestUsage))
            if not isinstance(usage, RequestUsage):
                self._loads.ended(replica_id, kind, now)
                return
            self._loads.ended(replica_id, kind, now, usage.computed)
            if keys:
                self._sizes.learn(kind, usage.prompt_tokens, usage.answer_tokens)
        except Exception:
            self._failed()

    def digest(self, replica_id: str, digest: AffinityDigest) -> None:
        """Update a replica's digest."""
        try:
            self._digests.replace(replica_id, digest.entries)
        except Exception:
            self._failed()

    def removed(self, replica_id: str) -> None:
        """Forget a replica."""
        try:
            self._digests.remove(replica_id)
            self._sent.remove(replica_id)
            self._loads.remove(replica_id)
        except Exception:
            self._failed()

    def _failed(self) -> None:
        if not self.failures:
            _log.exception("a router call failed and is ignored; further ones are not logged")
        self.failures += 1

    def _choose(self, keys: list[bytes], tokens: int, loads: dict[str, float]) -> list[str]:
        if len(loads) < 2:
            return list(loads)
        policy, now = self._policy, self._clock()
        length = self._length(keys, tokens)
        self._loads.add_new(loads)
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
        """Return a request's tokens.

        If unknown, they are estimated from its keys and from the replicas' digests.
        """
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
        """Return replica -> tokens of a request in its cache, as far as known."""
        reuse: dict[str, float] = {}
        share = tokens / max(1, place_of(keys[0]).tokens) if keys else 0.0
        since = now - self._policy.sent_seconds
        missing = set(ids)
        for key in keys:
            if not missing:
                break
            held = self._digests.holders(key)
            for replica in missing & held.keys():
                reuse[replica] = min(float(held[replica]), tokens)
            missing -= reuse.keys()
            sent = missing & self._sent.recent(key, since)
            if sent:
                reuse.update(dict.fromkeys(sent, min(place_of(key).tokens * share, tokens)))
                missing -= sent
        return reuse

    def _home_key(self, keys: list[bytes]) -> bytes:
        """Return the key for the home of a request.

        Its prefix ends with the first medium, or without media in the middle of the prompt. A
        request without keys gets a new one.
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
    """Return replica id -> load, without replicas whose id is invalid."""
    loads: dict[str, float] = {}
    for replica in replicas:
        name, load = getattr(replica, "id", None), getattr(replica, "load", None)
        if isinstance(name, str):
            usable = isinstance(load, int | float) and math.isfinite(load) and load > 0
            loads[name] = float(load) if usable and load is not None else 0.0
    return loads


_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
MAX_REPLICAS_REMEMBERED = 4096


class RendezvousHash:
    """Ranks replicas for a key (Thaler and Ravishankar, 1998), the same in all routers.

    They need no communication. When a replica joins or leaves, only its own share of keys moves.
    Caches the hashes of at most MAX_REPLICAS_REMEMBERED ids.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def weights(self, key: bytes, ids: Iterable[str]) -> dict[str, int]:
        """Return the weights of replicas for a key."""
        base, numbers, weights = _number(key), self._numbers, dict[str, int]()
        for replica in ids:
            number = numbers.get(replica)
            if number is None:
                number = self._remember(replica)
            mixed = ((base ^ number) * _MIX) & _MASK
            weights[replica] = ((mixed ^ (mixed >> 32)) * _MIX) & _MASK
        return weights

    def _remember(self, replica: str) -> int:
        if len(self._numbers) >= MAX_REPLICAS_REMEMBERED:
            self._numbers.clear()
        number = self._numbers[replica] = _number(replica.encode("utf-8", "surrogatepass"))
        return number


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


RATE = 1 / 8
"""Weight of a new request in the moving averages."""
MIN_FACTOR, MAX_FACTOR = 1 / 64, 8.0
MAX_ANSWER_TOKENS = 65_536


class SizeEstimator:
    """Estimates the tokens of requests and of their answers.

    The tokens per byte of an upload depend on the model, and a router does not decode uploads. So
    the guess from the key is multiplied by a learned factor. There is one factor per power of two
    of the guessed size per medium, to separate images from larger clips, and one for texts.

    Args:
        answer_tokens: initial estimate for answers.

    Attributes:
        answer: estimated tokens of an answer.
    """

    def __init__(self, answer_tokens: float) -> None:
        self.answer = answer_tokens
        self._factors: dict[int, float] = {}

    def guess(self, key: AffinityKey) -> float:
        """Estimate the tokens of a request from its longest key."""
        return place_of(key).tokens * self.factor(key)

    def factor(self, key: AffinityKey) -> float:
        """Return the correction factor for requests with this longest key."""
        return self._factors.get(_magnitude(key), 1.0)

    def learn(self, key: AffinityKey, prompt_tokens: float, answer_tokens: float) -> None:
        """Learn from the token counts of an ended request, given its longest key."""
        self.answer += RATE * (min(max(answer_tokens, 0.0), MAX_ANSWER_TOKENS) - self.answer)
        factor = self.factor(key)
        measured = prompt_tokens / max(1, place_of(key).tokens)
        factor += RATE * (min(max(measured, MIN_FACTOR), MAX_FACTOR) - factor)
        self._factors[_magnitude(key)] = factor


def _magnitude(key: AffinityKey) -> int:
    """Return the bit length of the guessed size per medium, 0 to 16; -1 without media."""
    place = place_of(key)
    return (place.media_units // place.media).bit_length() if place.media else -1


MAX_REPLICAS = 4096
MAX_OPEN_KINDS = 65_536
"""Kinds of open requests: pairs of a replica and a longest key."""
_MAX_AGE = 50.0


class Loads:
    """Tokens to compute, by replica.

    Args:
        memory_seconds: time constant: after so long, assigned work counts 1/e.
    """

    def __init__(self, memory_seconds: float) -> None:
        self._memory_seconds = memory_seconds
        # All work decays alike, so it is stored as of `_since`, and later work is added scaled up.
        self._work: dict[str, float] = {}
        self._since = 0.0
        self._open: dict[str, float] = {}
        self._kinds: OrderedDict[tuple[str, bytes], list[float]] = OrderedDict()

    def works(self, now: float) -> tuple[dict[str, float], float]:
        """Return recent tokens by replica, read-only, and their scale factor."""
        growth = self._growth(now)  # it may scale all work anew
        return self._work, growth

    def _growth(self, now: float) -> float:
        age = (now - self._since) / self._memory_seconds
        if age > _MAX_AGE:
            growth = math.exp(min(age, 700.0))
            self._work = {name: work / growth for name, work in self._work.items()}
            self._since, age = now, 0.0
        return math.exp(age)

    def open(self, replica: str) -> float:
        """Return the tokens of a replica's open requests."""
        return self._open.get(replica, 0.0)

    def add_new(self, replicas: Iterable[str]) -> None:
        """Add new replicas, with the average work of the others.

        Starting at zero, a new replica would attract all requests.
        """
        new = [replica for replica in replicas if replica not in self._work]
        if not new:
            return
        if len(self._work) + len(new) > MAX_REPLICAS:
            self._work.clear()
            self._open.clear()
        average = sum(self._work.values()) / len(self._work) if self._work else 0.0
        self._work.update(dict.fromkeys(new, average))

    def sent(self, replica: str, kind: bytes, tokens: float, now: float) -> None:
        """Add a request for a replica, with the tokens to compute."""
        growth = self._growth(now)
        self._work[replica] = self._work.get(replica, 0.0) + tokens * growth
        self._open[replica] = self.open(replica) + tokens
        entry = self._kinds.setdefault((replica, kind), [0.0, 0.0])
        entry[0] += 1
        entry[1] += tokens
        if len(self._kinds) > MAX_OPEN_KINDS:
            (other, _), (_, forgotten) = self._kinds.popitem(last=False)
            self._close(other, forgotten)

    def ended(self, replica: str, kind: bytes, now: float, computed: float | None = None) -> None:
        """Remove a request of that kind; an unknown kind changes nothing.

        Args:
            computed: tokens that were computed, if known; they replace the expected ones.
        """
        entry = self._kinds.get((replica, kind))
        if entry is None:
            return
        tokens = entry[1] / entry[0]
        if computed is not None:
            more = (computed - tokens) * self._growth(now)
            self._work[replica] = max(0.0, self._work.get(replica, 0.0) + more)
        entry[0] -= 1
        entry[1] -= tokens
        if entry[0] < 1:
            del self._kinds[replica, kind]
        self._close(replica, tokens)

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        self._work.pop(replica, None)
        self._open.pop(replica, None)
        for entry in [entry for entry in self._kinds if entry[0] == replica]:
            del self._kinds[entry]

    def _close(self, replica: str, tokens: float) -> None:
        if replica in self._open:
            self._open[replica] = max(0.0, self._open[replica] - tokens)
