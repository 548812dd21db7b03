"""Learning from partings of prompts."""

from __future__ import annotations

from vlm_serve.cache.placement import (
    INTERVAL,
    LEARNED,
    MOST_GROUPS,
    MOST_PLACES,
    MOST_WANTS,
    LearnedPlace,
    Places,
)

BLOCK, GAIN = 16, 64
ROOT = b"tenant"


def places(*, rows: int = 100, learned: bool = True) -> Places:
    return Places(BLOCK, rows, GAIN, learned=learned)


def document(found: Places, length: int, parted: int | None, root: bytes = ROOT) -> None:
    """A prompt; another one parts `parted` tokens before its end."""
    planned = found.plan(root, 0, length, {length - 1: "prompt_end", length // 2: INTERVAL})
    if parted is not None:
        found.parted(planned, (length - parted) // BLOCK * BLOCK)


def test_places_from_the_end_are_learned_from_prompts_of_any_length() -> None:
    found = places()
    assert found.of(ROOT) == ()
    for index in range(12):
        document(found, 1000 + 170 * index, 40)
    learned = found.of(ROOT)
    assert {each.from_end for each in learned} == {True}
    assert {each.blocks for each in learned} <= {2, 3}
    assert learned[0].position(1000, BLOCK) in (944, 960)


def test_places_from_the_start_are_learned_where_ends_differ() -> None:
    found = places()
    for index in range(12):
        document(found, 1000 + 170 * index, 1000 + 170 * index - 480)
    assert found.of(ROOT) == (LearnedPlace(30, from_end=False),)


def test_few_wants_change_nothing_and_so_do_tenants() -> None:
    found = places()
    for index in range(3):
        document(found, 1000 + 170 * index, 40)
    assert found.of(ROOT) == ()
    for index in range(12):
        document(found, 1000 + 170 * index, 40, b"other")
    assert found.of(ROOT) == () and found.of(b"other")


def test_without_learning_nobody_gets_places() -> None:
    found = places(learned=False)
    for index in range(40):
        document(found, 1000 + 170 * index, 40)
    planned = found.plan(ROOT, 0, 900, {})
    found.parted(planned, 800)
    assert found.of(ROOT) == ()
    assert found.expected(planned, INTERVAL) == 1.0
    assert not found.is_junction(planned, 800, GAIN)


def test_what_is_past_decays() -> None:
    """Prompts part elsewhere from some time on: the old place is given up."""
    found = places()
    for index in range(60):
        document(found, 1000 + 170 * index, 40)
    for index in range(1500):
        document(found, 1000 + 170 * (index % 60), 160)
    assert found.of(ROOT) and {each.blocks for each in found.of(ROOT)} <= {10, 11}


def test_only_the_first_prompt_that_parts_is_a_want() -> None:
    found = places()
    planned = found.plan(ROOT, 0, 1000, {})
    for _ in range(50):
        found.parted(planned, 960)
        found.plan(ROOT, 960, 1000, {})
    assert found.of(ROOT) == ()


def test_many_little_gains_make_a_junction() -> None:
    found = places()
    planned = found.plan(ROOT, 0, 1000, {})
    assert not found.is_junction(planned, 960, 32)
    found.parted(planned, 960)
    assert found.is_junction(planned, 960, 32)
    assert not found.is_junction(planned, 960, 31)
    found.parted(planned, 960)
    assert found.is_junction(planned, 960, 31)


def test_snapshots_that_nobody_asks_for_are_expected_to_be_of_less_use() -> None:
    found = places(rows=32)
    first = found.plan(ROOT, 0, 1000, {256: INTERVAL})
    end, regular = found.expected(first, "prompt_end"), found.expected(first, INTERVAL)
    assert float(end) == 1.0, "nothing is known of it"
    assert float(regular) == 1 / 16, "it has to show first that anybody parts there"
    for _ in range(200):
        planned = found.plan(ROOT, 0, 1000, {256: INTERVAL, 512: INTERVAL, 768: LEARNED})
        found.parted(planned, 800)
    assert found.expected(planned, INTERVAL) is regular, "what is learned holds for older ones too"
    assert float(regular) < 0.05 and float(found.expected(planned, LEARNED)) > 0.9


def test_the_horizon_follows_the_gaps_of_reuse() -> None:
    found = places()
    short = found.horizon
    for _ in range(200):
        document(found, 1000, 40)
    near = found.horizon
    assert near < short, "the next prompt parts from the last one"
    plans = [found.plan(ROOT, 0, 4000, {}) for _ in range(600)]
    for planned in plans[:400]:
        found.plan(ROOT, 0, 4000, {})
        found.parted(planned, 3200)
    assert found.horizon > 20 * near
    horizon = found.horizon
    found.parted(found.plan(ROOT, 3200, 4000, {}), 3200)
    assert found.horizon == horizon, "it had nothing from that prompt"


def test_everything_is_bounded() -> None:
    found = places(rows=10)
    for tenant in range(MOST_GROUPS + 20):
        document(found, 1000, 40, bytes([tenant]))
    assert len(found._groups) == MOST_GROUPS and b"\0" not in found._groups
    assert len(found._recent) == found._window == 32
    for index in range(5 * MOST_WANTS):
        document(found, 16_000 + index * BLOCK, 16 + 7 * index)
    group = found._groups[ROOT]
    assert len(group.wants) == MOST_WANTS
    assert 0 < len(group.places) <= MOST_PLACES
