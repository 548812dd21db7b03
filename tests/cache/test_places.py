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
    assert found.table(ROOT) is None
    for index in range(12):
        document(found, 1000 + 170 * index, 40)
    table = found.table(ROOT)
    assert table is not None and table.places
    assert {each.from_end for each in table.places} == {True}
    assert {each.blocks for each in table.places} <= {2, 3}
    assert table.places[0].position(1000, BLOCK) in (944, 960)


def test_places_from_the_start_are_learned_where_ends_differ() -> None:
    found = places()
    for index in range(12):
        document(found, 1000 + 170 * index, 1000 + 170 * index - 480)
    table = found.table(ROOT)
    assert table is not None and table.places == (LearnedPlace(30, from_end=False),)


def test_few_wants_change_nothing_and_so_do_tenants() -> None:
    found = places()
    for index in range(3):
        document(found, 1000 + 170 * index, 40)
    assert found.table(ROOT) is None
    for index in range(12):
        document(found, 1000 + 170 * index, 40, b"other")
    assert found.table(ROOT) is None and found.table(b"other") is not None


def test_without_learning_nobody_gets_a_table() -> None:
    found = places(learned=False)
    for index in range(40):
        document(found, 1000 + 170 * index, 40)
    planned = found.plan(ROOT, 0, 900, {})
    found.parted(planned, 800)
    assert found.table(ROOT) is None
    assert found.expected(planned, INTERVAL) == 1.0
    assert not found.is_junction(planned, 800, GAIN)


def test_what_is_past_decays() -> None:
    """Prompts part elsewhere from some time on: the old place is given up."""
    found = places()
    for index in range(60):
        document(found, 1000 + 170 * index, 40)
    for index in range(1500):
        document(found, 1000 + 170 * (index % 60), 160)
    table = found.table(ROOT)
    assert table is not None
    assert {each.blocks for each in table.places} <= {10, 11}


def test_only_the_first_prompt_that_parts_is_a_want() -> None:
    found = places()
    planned = found.plan(ROOT, 0, 1000, {})
    for _ in range(50):
        found.parted(planned, 960)
        found.plan(ROOT, 960, 1000, {})
    table = found.table(ROOT)
    assert table is not None and table.places == ()


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
    for _ in range(200):
        planned = found.plan(ROOT, 0, 1000, {256: INTERVAL, 512: INTERVAL, 768: LEARNED})
        found.parted(planned, 800)
    assert found.expected(planned, INTERVAL) < 0.05
    assert found.expected(planned, LEARNED) == 1.0
    assert found.expected(planned, "media") == 1.0  # nothing is known of it
    table = found.table(ROOT)
    assert table is not None and table.intervals_pay(2048) and not table.intervals_pay(64)


def test_a_row_costs_what_evictions_have_cost() -> None:
    found = places()
    least = found.price
    for _ in range(10):
        found.evicted()
    assert found.price == least
    for _ in range(10):
        found.missed(500)
    assert found.price == 500.0
    for _ in range(2000):
        found.plan(ROOT, 0, 100, {})
    assert found.price == least


def test_a_price_leaves_fewer_places() -> None:
    def chosen(price: int) -> int:
        found = places()
        if price:
            found.evicted()
            found.missed(price * 20)
        for index in range(40):
            document(found, 1000 + 170 * index, 20 + 50 * (index % 4))
        table = found.table(ROOT)
        assert table is not None
        return len(table.places)

    assert MOST_PLACES >= chosen(0) > chosen(1) >= 1


def test_everything_is_bounded() -> None:
    found = places(rows=10)
    for tenant in range(MOST_GROUPS + 20):
        document(found, 1000, 40, bytes([tenant]))
    assert len(found._groups) == MOST_GROUPS and b"\0" not in found._groups
    assert len(found._recent) == found._horizon == 32
    for index in range(5 * MOST_WANTS):
        document(found, 16_000 + index * BLOCK, 16 + 7 * index)
    group = found._groups[ROOT]
    assert len(group.wants) == MOST_WANTS
    assert group.table is not None and len(group.table.places) <= MOST_PLACES
