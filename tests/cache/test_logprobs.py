"""Rows of prompt log-probabilities kept with the tokens that they are about."""

from __future__ import annotations

import numpy as np
import pytest
from cache_texts import END_OF_TURN, Text
from cache_world import World, make_world

from vlm_serve.cache.logprobs import WantedRows
from vlm_serve.cache.prefix_cache import Match

ALL = WantedRows(1, 2)


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def score(world: World, text: Text, wants: WantedRows | None = ALL, *ends: int) -> None:
    run = world.start(text, wants=wants)
    assert run is not None
    for end in ends or (len(text),):
        assert world.step(run, end)
        world.check()
    world.close(run)
    world.check()


def found(world: World, text: Text, wants: WantedRows = ALL) -> tuple[int, int, str]:
    """(boundary, the first row that is missing, reason)."""
    match = world.match(text, wants=wants)
    return match.boundary, end_of(match, wants), match.reason


def end_of(match: Match, wants: WantedRows = ALL) -> int:
    return match.logprobs[-1].end if match.logprobs else wants.first


def test_a_prompt_that_parts_computes_the_row_before_the_parting() -> None:
    world = make_world()
    score(world, Text(numbers(13)))
    # 8 tokens are shared: the rows of tokens 1 to 7 are kept, that of token 8 comes out of token 7.
    assert found(world, Text(numbers(8), numbers(5, 50))) == (4, 8, "prompt_logprobs")
    assert world.match(Text(numbers(8), numbers(5, 50))).boundary == 8
    # Two tokens of the third block are shared as well, which nobody can know.
    assert found(world, Text(numbers(10), numbers(5, 50))) == (4, 8, "prompt_logprobs")


def test_the_same_prompt_computes_what_no_node_ends_behind() -> None:
    world = make_world()
    score(world, Text(numbers(13)))
    assert found(world, Text(numbers(13))) == (8, 12, "prompt_logprobs")
    assert found(world, Text(numbers(12))) == (8, 12, "full"), "the last row that there is"


def test_tails_have_rows_of_their_own() -> None:
    world = make_world()
    score(world, Text([10, 11, 12, 13, 14, END_OF_TURN], numbers(7, 20)))
    other = Text([10, 11, 12, 13, 14, END_OF_TURN], numbers(7, 60))
    assert found(world, other) == (4, 6, "prompt_logprobs")
    score(world, other, ALL, 6, 13)
    assert found(world, other) == (8, 12, "prompt_logprobs")


def test_an_unknown_prompt_is_cold() -> None:
    world = make_world()
    score(world, Text(numbers(13)))
    assert found(world, Text(numbers(13, 50))) == (0, 1, "cold")


def test_kv_without_rows_is_computed_again_and_gets_them() -> None:
    world, text = make_world(), Text(numbers(13))
    score(world, text, None)
    assert found(world, text) == (0, 1, "prompt_logprobs")
    score(world, text)
    assert found(world, text) == (8, 12, "prompt_logprobs")


def test_rows_serve_those_who_want_no_more_of_them() -> None:
    world, text = make_world(), Text(numbers(13))
    score(world, text, WantedRows(1, 3))
    for top in (0, 2, 3):
        assert found(world, text, WantedRows(1, top)) == (8, 12, "prompt_logprobs")
    assert found(world, text, WantedRows(1, 4)) == (0, 1, "prompt_logprobs")
    score(world, text, WantedRows(1, 4))
    assert found(world, text, WantedRows(1, 4)) == (8, 12, "prompt_logprobs")
    score(world, text, WantedRows(1, 0))
    assert found(world, text, WantedRows(1, 4)) == (8, 12, "prompt_logprobs"), "the larger stays"


def test_only_wanted_rows_hold_the_hit_back() -> None:
    world, text = make_world(), Text(numbers(13))
    score(world, text, None)
    assert found(world, text, WantedRows(10, 1)) == (8, 10, "prompt_logprobs")
    assert found(world, text, WantedRows(8, 1)) == (4, 8, "prompt_logprobs")
    score(world, text, WantedRows(6, 1))
    # Tokens 4 and 5 have no row, so that their block has none.
    assert found(world, text, WantedRows(8, 1)) == (8, 12, "prompt_logprobs")
    assert found(world, text, WantedRows(6, 1)) == (4, 6, "prompt_logprobs")


def test_tenants_share_nothing() -> None:
    world = make_world()
    score(world, Text(numbers(13)))
    assert found(world, Text(numbers(13), salt="tenant")) == (0, 1, "salt")


def test_rows_go_with_their_node() -> None:
    world, text = make_world(), Text(numbers(13))
    score(world, text)
    assert world.cache.usage.logprob_bytes > 0
    world.cache.flush()
    assert world.cache.usage.logprob_bytes == 0
    assert found(world, text) == (0, 1, "cold")


def test_a_failed_step_leaves_none() -> None:
    world, text = make_world(), Text(numbers(13))
    run = world.start(text, wants=ALL)
    assert run is not None
    world.fail(run, 13)
    assert world.cache.usage.logprob_bytes == 0


def test_what_a_private_request_computes_stays_its_own() -> None:
    world, text = make_world(), Text(numbers(13))
    lease = world.cache.open(None, private=True)
    assert world.cache.take_row(lease) and world.cache.grow(lease, 13)
    known = text.logprobs(1, 13, 2)
    from vlm_serve.cache.logprobs import RowPiece

    world.cache.commit(lease, text.keys, 13, exact_until=13, logprobs=RowPiece(1, known))
    assert world.cache.usage.logprob_bytes == 0
    world.cache.close(lease)


def bytes_of(text: Text) -> int:
    """What the rows of one such text take."""
    world = make_world()
    score(world, text)
    return world.cache.usage.logprob_bytes


@pytest.mark.parametrize("has_state", [True, False])
def test_the_least_recently_used_rows_make_room(has_state: bool) -> None:
    texts = [Text(numbers(13, first)) for first in (10, 40, 70)]
    world = make_world(logprob_bytes=2 * bytes_of(texts[0]), has_state=has_state)
    for text in texts[:2]:
        score(world, text)
    score(world, texts[0])
    score(world, texts[2])
    ends = [end_of(world.match(text, wants=ALL)) for text in texts]
    assert ends == [12, 1, 12]
    assert world.match(texts[1]).boundary == 12, "the KV stays"


def test_a_prompt_keeps_its_first_rows_where_there_is_no_room_for_all() -> None:
    text = Text(numbers(13))
    world = make_world(logprob_bytes=bytes_of(text) // 3 + 8)
    score(world, text)
    assert found(world, text) == (0, 4, "prompt_logprobs")
    other = Text(numbers(13, 50))
    score(world, other)
    assert end_of(world.match(other, wants=ALL)) == 4
    assert end_of(world.match(text, wants=ALL)) == 1


def test_stored_rows_are_copies_that_nobody_can_change() -> None:
    world, text = make_world(), Text(numbers(13))
    score(world, text)
    (node, *_) = world.cache.nodes()
    assert node.logprobs is not None and not node.logprobs.flags.writeable
    piece = world.match(text, wants=WantedRows(1, 1)).logprobs[0]
    piece.rows["rank"] = 0
    assert np.array_equal(node.logprobs, text.logprobs(1, 4, 2))
