"""What goes first when room is short (docs/architecture.md#state)."""

from __future__ import annotations

from cache_texts import END_OF_TURN, Image, Text
from cache_world import World, listed, make_world

from vlm_serve.cache.placement import Share


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def take_blocks(world: World, count: int) -> None:
    """Another request takes blocks and leaves."""
    lease = world.cache.open(None)
    assert world.cache.grow(lease, count * world.config.block_size)
    world.cache.close(lease)
    world.check()


def take_rows(world: World, count: int) -> None:
    """Another request reserves snapshot rows, as for junctions, and leaves."""
    lease = world.cache.open(None)
    for index in range(count):
        assert world.cache.reserve_snapshot(lease, (index + 1) * 4, "junction") is not None
    world.cache.close(lease)
    world.check()


def test_kv_beyond_the_last_snapshot_goes_first_even_if_it_is_newer() -> None:
    world = make_world(num_blocks=8)
    old, new = Text(numbers(16)), Text(numbers(16, 50))
    world.serve(old, snapshots=lambda position: position == 16)
    world.serve(new, snapshots=lambda position: position == 8)
    take_blocks(world, 2)
    assert world.match(old, limit=15).kv_tokens == 16
    assert world.match(new).boundary == 8 == world.match(new).kv_tokens


def test_without_state_layers_nothing_is_beyond_a_snapshot() -> None:
    world = make_world(num_blocks=8, has_state=False)
    old, new = Text(numbers(16)), Text(numbers(16, 50))
    world.serve(old)
    world.serve(new)
    take_blocks(world, 2)
    assert world.match(old).kv_tokens == 8
    assert world.match(new).kv_tokens == 16


def test_leaves_go_before_what_they_stand_on() -> None:
    """A strict prefix of a live entry is never evicted: the state beyond it would be useless."""
    world = make_world(num_blocks=6)
    world.serve(Text(numbers(20)))
    for count in range(1, 6):
        take_blocks(world, count + 1)
        assert world.match(Text(numbers(21))).kv_tokens == 20 - 4 * count


def test_an_unpinned_leaf_below_a_pinned_path_goes() -> None:
    world = make_world(num_blocks=6)
    world.serve(Text(numbers(16)))
    run = world.start(Text(numbers(8), [60]))
    assert run is not None and run.lease.blocks[:2]
    assert len(run.lease.blocks) == 3 and world.cache.free_block_count == 1
    assert world.cache.available_block_count == 3
    take_blocks(world, 3)
    assert world.match(Text(numbers(16))).kv_tokens == 8
    assert world.step(run, 9)
    world.close(run)
    world.check()


def test_a_pinned_leaf_keeps_its_whole_path() -> None:
    world = make_world(num_blocks=5)
    world.serve(Text(numbers(16)))
    lease = world.cache.open(world.match(Text(numbers(17))))
    assert len(lease.blocks) == 4
    other = world.cache.open(None)
    assert not world.cache.grow(other, 8)
    assert world.cache.grow(other, 4)
    world.check()
    world.cache.close(lease)
    assert world.cache.grow(other, 20)
    world.check()


def test_tails_and_the_full_node_of_a_block_are_freed_together() -> None:
    """Three nodes hold one physical block; it is free when the last has gone."""
    world = make_world(num_blocks=4, block_size=8)
    text = Text([10, END_OF_TURN, 11, END_OF_TURN], numbers(4), block_size=8)
    world.serve(text, snapshots=lambda position: position == 2)
    nodes = listed(world)
    assert [(node.start, node.end, node.tail) for node in nodes] == [
        (0, 8, False),
        (0, 2, True),
        (0, 4, True),
    ]
    assert len({node.block for node in nodes}) == 1
    assert world.cache.free_block_count == 3
    take_blocks(world, 4)
    assert world.cache.usage.nodes == 0 and world.cache.stats.evictions["tail"] == 2


def test_a_tail_goes_with_the_node_above_it_or_before() -> None:
    world = make_world(num_blocks=4)
    world.serve(Text(numbers(4), [10, END_OF_TURN, 11]))
    assert [node.tail for node in listed(world)] == [False, True]
    take_blocks(world, 3)
    assert [node.tail for node in listed(world)] == [False]
    take_blocks(world, 4)
    assert world.cache.usage.nodes == 0
    assert world.cache.usage.rows["ready"] == 0


def test_a_tail_outlives_the_request_that_fills_its_block() -> None:
    world = make_world(num_blocks=4, block_size=8)
    first = Text([10, END_OF_TURN, 11], block_size=8)
    run = world.start(first)
    assert run is not None
    world.step(run, 3)
    tail_block = run.lease.blocks[0]
    second = Text([10, END_OF_TURN], numbers(9, 50), block_size=8)
    follower = world.start(second)
    assert follower is not None and follower.lease.boundary == 2
    for token in numbers(6, 70):
        first.append(token)
        assert world.step(run, len(first))
    world.close(run)
    assert world.step(follower, len(second))
    assert follower.lease.blocks[0] != tail_block
    world.close(follower)
    world.check()


def test_evicting_a_snapshot_demotes_the_kv_behind_it() -> None:
    world = make_world(num_blocks=8, num_live_rows=1, num_snapshot_rows=1)
    old, new = Text(numbers(12)), Text(numbers(12, 50))
    world.serve(old, snapshots=lambda position: position == 12)
    world.serve(new, snapshots=lambda position: position == 12)
    take_rows(world, 2)
    assert world.cache.usage.rows["ready"] == 0
    assert world.match(old).kv_boundary == 8
    world.serve(old, snapshots=lambda position: position == 12)
    take_blocks(world, 5)
    assert world.match(old, limit=11).kv_tokens == 12
    assert world.match(new).kv_tokens == 0


def test_the_snapshot_used_longest_ago_goes_when_all_else_is_equal() -> None:
    world = make_world(num_live_rows=1, num_snapshot_rows=3)
    texts = [Text(numbers(9, first)) for first in (10, 30, 50)]
    for text in [*texts, texts[0]]:
        world.serve(text, snapshots=lambda position: position == 8)
    for snapshot in world.cache.ledger.spare_snapshots:
        snapshot.hits = 0
        world.cache.ledger.refresh_snapshot(snapshot)
    take_rows(world, 2)
    assert [world.match(text).boundary for text in texts] == [8, 0, 8]


def test_value_takes_the_snapshot_that_saves_least() -> None:
    world = make_world(num_live_rows=1, num_snapshot_rows=2)
    short, long = Text(numbers(5)), Text(numbers(17, 50))
    world.serve(long, snapshots=lambda position: position == 16)
    world.serve(short, snapshots=lambda position: position == 4)
    take_rows(world, 2)
    assert world.match(long).boundary == 16 and world.match(short).boundary == 0


def test_value_counts_what_is_saved_beyond_the_snapshot_before() -> None:
    """4 tokens past another snapshot are worth less than 8 from the start."""
    world = make_world(num_live_rows=1, num_snapshot_rows=3)
    deep, other = Text(numbers(17)), Text(numbers(9, 50))
    world.serve(deep, snapshots=lambda position: position in (12, 16))
    world.serve(other, snapshots=lambda position: position == 8)
    take_rows(world, 2)
    assert world.match(deep).boundary == 12 and world.match(other).boundary == 8


def test_value_is_taken_anew_when_the_snapshot_before_has_gone() -> None:
    """The deeper snapshot of a pair is worth the whole path once the other is gone."""
    world = make_world(num_live_rows=1, num_snapshot_rows=3)
    deep, other = Text(numbers(21)), Text(numbers(13, 50))
    world.serve(deep, snapshots=lambda position: position in (8, 16))
    world.serve(other, snapshots=lambda position: position == 12)
    match = world.match(deep, limit=9)
    assert match.snapshot is not None
    world.cache.ledger.remove_snapshot(match.snapshot)
    world.check()
    take_rows(world, 3)
    assert world.match(deep).boundary == 16 and world.match(other).boundary == 0


def test_reuse_raises_the_value() -> None:
    world = make_world(num_live_rows=1, num_snapshot_rows=2)
    used, longer = Text(numbers(9)), Text(numbers(13, 50))
    world.serve(used, snapshots=lambda position: position == 8)
    for _ in range(2):
        world.serve(used, snapshots=lambda position: False)
    world.serve(longer, snapshots=lambda position: position == 12)
    take_rows(world, 2)
    assert world.match(used).boundary == 8 and world.match(longer).boundary == 0


def test_old_value_gives_way_in_the_end() -> None:
    """Evict what was of use three times, long ago, before what was of use once, of late."""
    world = make_world(num_blocks=40, num_live_rows=1, num_snapshot_rows=2)
    old, new = Text(numbers(9)), Text(numbers(9, 50))
    for text in (old, old, old, new):
        world.serve(text, snapshots=lambda position: position == 8)
        world.cache.ledger.spare_snapshots.admit(4.0)
    take_rows(world, 2)
    assert world.match(old).boundary == 8 and world.match(new).boundary == 0
    for _ in range(20):
        world.cache.ledger.spare_snapshots.admit(4.0)
    world.serve(new, snapshots=lambda position: position == 8)
    take_rows(world, 2)
    assert world.match(old).boundary == 0 and world.match(new).boundary == 8


def test_a_new_snapshot_needs_more_worth_than_what_goes_for_it() -> None:
    world = make_world(num_live_rows=1, num_snapshot_rows=2)
    long = Text(numbers(17))
    world.serve(long, snapshots=lambda position: position in (8, 16))
    lease = world.cache.open(None)
    assert world.cache.reserve_snapshot(lease, 4, "message") is not None, "a row is free"
    assert world.cache.reserve_snapshot(lease, 12, "message") is None
    assert world.cache.stats.skips["message"] == 1
    assert world.cache.reserve_snapshot(lease, 16, "message") is not None
    world.cache.close(lease)
    world.check()
    assert world.match(long).boundary == 16, "the earlier one has gone: both saved eight tokens"


def test_a_snapshot_that_nothing_is_expected_of_gives_way_to_any_until_it_is_used() -> None:
    world = make_world(num_live_rows=1, num_snapshot_rows=2)
    long = Text(numbers(17))
    world.serve(long, snapshots=lambda position: position in (8, 12))
    near = {each.position: each for each in world.cache.ledger.spare_snapshots}
    for each in near.values():
        each.expected = 0.0
        world.cache.ledger.refresh_snapshot(each)
    lease = world.cache.open(world.match(Text(numbers(9)), limit=8))
    assert lease.boundary == 8
    assert world.cache.reserve_snapshot(lease, 16, "near_end") is not None, "a row is free"
    assert near[12].node is not None
    assert world.cache.reserve_snapshot(lease, 12, "near_end") is not None
    assert near[12].node is None, "rather than the one in use, and although neither saves anything"
    world.cache.close(lease)
    world.check()


def test_what_was_expected_of_a_victim_is_expected_of_the_snapshot_before_it() -> None:
    world = make_world(num_live_rows=1, num_snapshot_rows=3)
    share = Share(planned=2.0, wanted=1.0)
    deep = Text(numbers(17))
    world.serve(deep, snapshots=lambda position: position in (8, 12))
    first, second = sorted(world.cache.ledger.spare_snapshots, key=lambda each: each.position)
    assert first.worth == 8 and second.worth == 4
    second.expected = share
    world.cache.ledger.refresh_snapshot(second)
    take_rows(world, 3)
    assert second.node is None and first.worth == 8 * 1.5
    share.add(wanted=True)
    assert first.worth > 8 * 1.6, "as of now"
    world.serve(deep, snapshots=lambda position: False)
    assert first.worth == 8 * 2, "until its next use"


def test_the_least_recent_conversation_goes_first_when_all_else_is_equal() -> None:
    world = make_world(num_blocks=9)
    texts = [Text(numbers(8, first)) for first in (10, 30, 50)]
    for text in [*texts, texts[0]]:
        world.serve(text)
    take_blocks(world, 5)
    kept = [world.match(text).kv_tokens for text in texts]
    assert kept == [8, 0, 8]


def test_flushing_spares_what_runs() -> None:
    world, text = make_world(), Text([10, END_OF_TURN], Image("cat", 6), numbers(8))
    world.serve(text)
    run = world.start(text)
    assert run is not None
    held = run.lease.boundary
    world.serve(Text(numbers(9, 70)))
    world.cache.flush()
    world.check()
    assert world.match(text).boundary == held
    assert world.step(run, len(text))
    world.close(run)
    world.cache.flush()
    world.check()
    assert world.cache.free_block_count == world.config.num_blocks
    assert world.match(text).reason == "cold"
