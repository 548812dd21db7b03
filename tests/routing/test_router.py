"""Where requests are sent: to what they reuse, unless that has too much to do."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_serve.preprocess.identity.affinity import AffinityDigest, affinity_keys_of_body, place_of
from vlm_serve.routing import holdings
from vlm_serve.routing import router as routers
from vlm_serve.routing.holdings import Digests, SentPrefixes
from vlm_serve.routing.router import Loads, Policy, RendezvousHash, Router
from vlm_serve.routing.view import ReplicaView, RequestUsage

NAMES = ["a", "b", "c", "d"]
VIEWS = [ReplicaView(name) for name in NAMES]
SYSTEM = {"role": "system", "content": "You are helpful. " * 100}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def keys_about(
    medium: str, question: str = "What?", system: bool = True, kind: str = "image"
) -> tuple[bytes, ...]:
    content = [
        {"type": f"{kind}_url", f"{kind}_url": {"url": f"https://example.com/{medium}"}},
        {"type": "text", "text": question},
    ]
    messages = [SYSTEM] * system + [{"role": "user", "content": content}]
    return affinity_keys_of_body("chat", {"messages": messages}, salt="", model="m")


def holding(*keys: bytes, tokens: int = 1000) -> AffinityDigest:
    return AffinityDigest(1, tuple((key, tokens) for key in keys))


def test_all_replicas_come_back_the_one_that_holds_it_first() -> None:
    for name in NAMES:
        router = Router(clock=Clock())
        keys = keys_about("cat")
        router.digest(name, holding(keys[1]))
        chosen = router.choose(keys_about("cat", "And this?"), 0, VIEWS)
        assert sorted(chosen) == NAMES
        assert chosen[0] == name


def test_a_router_remembers_where_it_sent_what_for_a_while() -> None:
    clock = Clock()
    router, keys = Router(clock=clock), keys_about("cat")
    home = router.choose(keys, 0, VIEWS)[0]
    other = next(name for name in NAMES if name != home)
    router.sent(other, keys, 0)
    clock.now = 5.0
    assert router.choose(keys_about("cat", "Why?"), 0, VIEWS)[0] == other
    router.ended(other, keys)
    clock.now = 60.0
    assert router.choose(keys_about("cat", "Why?"), 0, VIEWS)[0] == home, "no digest confirms it"


def test_an_open_request_counts_until_it_ends_however_long_its_prefill_takes() -> None:
    """The others wait there for the prefix, rather than compute it elsewhere."""
    clock = Clock()
    router, keys = Router(clock=clock), keys_about("cat")
    home = router.choose(keys, 0, VIEWS)[0]
    other = next(name for name in NAMES if name != home)
    router.sent(other, keys, 0)
    router.sent(other, keys, 0)
    clock.now = 300.0
    assert router.choose(keys_about("cat", "Why?"), 0, VIEWS)[0] == other
    router.ended(other, keys)
    assert router.choose(keys_about("cat", "Why?"), 0, VIEWS)[0] == other, "one is still open"
    router.ended(other, keys, usage=RequestUsage(1000, 0, 10))
    clock.now = 305.0
    assert router.choose(keys_about("cat", "Why?"), 0, VIEWS)[0] == other, "computed just now"
    clock.now = 400.0
    assert router.choose(keys_about("cat", "Why?"), 0, VIEWS)[0] == home


def test_what_every_replica_holds_speaks_for_none() -> None:
    keys = keys_about("cat")
    fresh, held = Router(clock=Clock()), Router(clock=Clock())
    for router in (fresh, held):
        router.choose(keys, 0, VIEWS)
        for name, tokens in zip(NAMES, (500, 4000, 100, 2000), strict=True):
            router.sent(name, keys_about(f"of {name}", system=False), tokens)
    for name in NAMES:
        held.digest(name, holding(*keys))
    assert held.choose(keys, 0, VIEWS) == fresh.choose(keys, 0, VIEWS)


def test_what_is_new_goes_where_less_was_given_what_is_held_stays() -> None:
    """Work counts against what a replica would compute, not against a request that is no work."""
    router, held = Router(Policy(home_weight=0.0), Clock()), keys_about("cat")
    router.choose(held, 0, VIEWS)
    router.digest("a", holding(held[0], tokens=1200))
    for name, tokens in zip(NAMES, (2000, 1500, 1000, 500), strict=True):
        router.sent(name, keys_about(f"of {name}", system=False), tokens)
    assert router.choose(keys_about("new"), 0, VIEWS) == ["d", "c", "b", "a"]
    assert router.choose(held, 0, VIEWS) == ["a", "d", "c", "b"]


def work(router: Router, replica: str, now: float) -> float:
    """The tokens assigned to a replica recently, with decay."""
    works, growth = router._loads.works(now)
    return works.get(replica, 0.0) / growth


def test_what_a_request_has_cost_takes_the_place_of_what_was_expected() -> None:
    clock = Clock()
    router, keys = Router(clock=clock), keys_about("cat")
    answer = Policy().answer_tokens
    router.choose(keys, 5000, VIEWS)
    router.sent("a", keys, 5000)
    assert work(router, "a", 0.0) == pytest.approx(5000 + answer)
    clock.now = 2.0
    before = work(router, "a", 2.0)
    router.ended("a", keys, 5000, RequestUsage(3000, 400, 50))
    assert router._loads.open("a") == 0.0
    assert work(router, "a", 2.0) == pytest.approx(before - 5000 - answer + 2650)
    router.sent("b", keys, 10)
    router.ended("b", keys, 10, RequestUsage(0, 900, 0))
    assert work(router, "b", 2.0) == 0.0, "no less than nothing"


def test_routers_learn_how_large_clips_are() -> None:
    """And whatever they learn of clips says nothing of pictures."""
    router = Router(clock=Clock())
    pictures = keys_about("picture")
    for number in range(50):
        keys = keys_about(f"clip {number}", kind="video")
        router.sent("a", keys, 0)
        router.ended("a", keys, 0, RequestUsage(900, 0, 20))
    expected = router._length(list(keys_about("another", kind="video")), 0)
    assert expected == pytest.approx(900, rel=0.05)
    assert router._length(list(pictures), 0) == place_of(pictures[0]).tokens
    held = keys_about("clip 0", "And now? " * 100, kind="video")
    router.digest("b", holding(held[1], tokens=850))
    rest = place_of(held[0]).tokens - place_of(held[1]).tokens
    known = 850 + rest * router._sizes.factor(held[0])
    assert router._length(list(held), 0) == known, "what somebody holds is known"
    router.sent("c", keys_about("last", kind="video"), 0)
    assert router._loads.open("c") == pytest.approx(900 + 20, rel=0.05)


def test_much_to_do_outweighs_what_is_held() -> None:
    router, keys = Router(clock=Clock()), keys_about("cat")
    router.digest("a", holding(keys[1]))
    views = [ReplicaView("a", 1e6), *VIEWS[1:]]
    assert router.choose(keys, 0, views)[-1] == "a"


def test_a_hot_medium_spreads_over_replicas() -> None:
    """Even if it alone makes all the work there is."""
    clock = Clock()
    router = Router(clock=clock)
    counts: Counter[str] = Counter()
    for number in range(400):
        clock.now += 0.05
        keys = keys_about("hot", f"question {number} " * 200)
        name = router.choose(keys, 0, VIEWS)[0]
        router.sent(name, keys, 0)
        router.ended(name, keys)
        counts[name] += 1
    assert len(counts) == 4
    assert max(counts.values()) <= 1.5 * 100


def test_an_end_takes_a_request_off_a_replica() -> None:
    policy = Policy(work_weight=0.0, load_weight=1.0, home_weight=0.0, answer_tokens=0.0)
    router, keys = Router(policy, Clock()), keys_about("cat")
    for _ in range(3):
        router.sent("a", keys, 5000)
    assert router._loads.open("a") == 5000, "the second and third find what the first leaves"
    other = keys_about("dog", system=False)
    assert router.choose(other, 5000, VIEWS)[-1] == "a"
    for _ in range(3):
        router.ended("a", keys, 5000)
    assert router._loads.open("a") == 0.0
    router.ended("a", keys, 5000)
    assert router._loads.open("a") == 0.0, "nobody ends twice"


def test_routers_agree_without_talking() -> None:
    one, other = Router(clock=Clock()), Router(clock=Clock())
    homes: Counter[str] = Counter()
    for number in range(400):
        keys = keys_about(f"medium {number}")
        again = keys_about(f"medium {number}", "another question")
        home = one.choose(keys, 0, VIEWS)[0]
        assert other.choose(again, 0, list(reversed(VIEWS)))[0] == home
        homes[home] += 1
    assert min(homes.values()) > 60


def home(rendezvous: RendezvousHash, key: bytes, names: list[str]) -> str:
    weights = rendezvous.weights(key, names)
    return max(weights, key=weights.__getitem__)


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 40), st.integers(0, 1000))
def test_a_replica_that_comes_or_goes_moves_its_share(count: int, seed: int) -> None:
    names = [f"replica-{seed}-{number}" for number in range(count)]
    rendezvous = RendezvousHash()
    keys = [number.to_bytes(16, "little") for number in range(600)]
    before = {key: home(rendezvous, key, names) for key in keys}
    after = {key: home(rendezvous, key, [*names, "new"]) for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert all(after[key] == "new" for key in moved), "nothing moves between old ones"
    assert len(moved) <= 600 / (count + 1) + 5 * (600 / (count + 1)) ** 0.5


def test_a_new_replica_gets_its_share_and_no_more() -> None:
    clock = Clock()
    router = Router(clock=clock)
    for number in range(200):
        clock.now += 0.1
        keys = keys_about(f"{number}")
        router.sent(router.choose(keys, 0, VIEWS)[0], keys, 0)
    counts: Counter[str] = Counter()
    for number in range(200, 300):
        clock.now += 0.1
        keys = keys_about(f"{number}")
        name = router.choose(keys, 0, [*VIEWS, ReplicaView("e")])[0]
        router.sent(name, keys, 0)
        counts[name] += 1
    assert 5 <= counts["e"] <= 40


def test_what_is_gone_is_forgotten() -> None:
    router, keys = Router(clock=Clock()), keys_about("cat")
    router.digest("a", holding(*keys))
    router.sent("a", keys, 0)
    router.removed("a")
    assert len(router._digests) == len(router._sent) == 0
    assert work(router, "a", 0.0) == router._loads.open("a") == 0.0
    assert "a" not in router.choose(keys, 0, VIEWS[1:])


ODD: list[Any] = [None, 3, "x", b"x", [None], [b""], [b"\xff" * 16], object(), {}, float("nan"), -1]


@pytest.mark.parametrize("second", ODD)
@pytest.mark.parametrize("first", ODD)
def test_nothing_raises(first: Any, second: Any) -> None:
    router = Router(clock=Clock())
    for replicas in (first, second, [first, second, *VIEWS], [ReplicaView(first, second), *VIEWS]):
        chosen = router.choose(first, second, replicas)
        assert isinstance(chosen, list)
        if isinstance(replicas, list) and VIEWS[0] in replicas:
            assert set(NAMES) <= set(chosen)
    router.sent(first, second, first)
    router.ended(second, first, second)
    router.ended("a", first, 0, second)
    for counts in ((first, second, 1), (1, 2, second)):
        router.ended("a", keys_about("cat"), 0, RequestUsage(*counts))
    router.digest(first, second)
    router.digest("a", AffinityDigest(first, second))
    router.digest("a", AffinityDigest(1, ((first, second),)))
    router.removed(first)
    assert sorted(router.choose(keys_about("cat"), 0, VIEWS)) == NAMES


@pytest.mark.parametrize("part", ["_rendezvous", "_digests", "_sent", "_loads", "_sizes", "_clock"])
def test_a_fault_inside_leaves_a_choice(part: str, caplog: pytest.LogCaptureFixture) -> None:
    router, keys = Router(clock=Clock()), keys_about("cat")
    setattr(router, part, None)
    firsts = {router.choose(keys, 0, VIEWS)[0] for _ in range(8)}
    assert firsts == set(NAMES), "one after the other"
    calls: list[Callable[[], object]] = [
        lambda: router.sent("a", keys, 0),
        lambda: router.ended("a", keys, 0, RequestUsage(1000, 0, 10)),
        lambda: router.digest("a", holding(*keys)),
        lambda: router.removed("a"),
    ]
    for call in calls:
        call()
    assert router.failures >= 8
    assert len(caplog.records) == 1, "told once"


def test_its_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "MAX_OPEN_KINDS", 100)
    digests, sent, given_work = Digests(limit=1000), SentPrefixes(limit=1000), Loads(10.0)
    number = itertools.count()

    def fresh() -> bytes:
        return next(number).to_bytes(16, "little")

    for replica in range(50):
        digests.replace(f"{replica}", [(fresh(), 1) for _ in range(5000)])
        assert len(digests) <= 1000
    for _ in range(300):
        sent.add(f"{next(number)}", [b"shared" * 3, *(fresh() for _ in range(10))], 0.0)
        given_work.sent("a", fresh(), 1.0, 0.0)
    assert len(sent) <= 1000
    assert len(sent.recent(b"shared" * 3, 0.0)) == holdings.MAX_SENT_REPLICAS
    assert given_work.open("a") <= 100, "what is forgotten counts as ended"
    for replica in range(50):
        digests.remove(f"{replica}")
    assert len(digests) == 0 and not digests._holders


def test_a_digest_of_many_replicas_takes_some_megabytes() -> None:
    """At the bound itself: 131 072 entries, no key twice."""
    router = Router(clock=Clock())
    number = itertools.count()
    tracemalloc.start()
    for replica in range(64):
        entries = [(next(number).to_bytes(16, "little"), 1000 + replica) for _ in range(2048)]
        router.digest(f"{replica}", AffinityDigest(1, tuple(entries)))
        del entries
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(router._digests) == holdings.MAX_ALL_ENTRIES
    assert held < 80e6


def test_it_needs_neither_torch_nor_ray() -> None:
    code = "import sys, vlm_serve.routing.router; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_work_and_its_scale_belong_together_after_a_long_time() -> None:
    loads = Loads(10.0)
    loads.sent("a", b"", 1e6, 0.0)
    works, growth = loads.works(501.0)
    assert works["a"] / growth < 1e-12, "what was sent 50 time constants ago counts"
