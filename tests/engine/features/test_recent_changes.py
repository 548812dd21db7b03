"""The last minutes of a cache, kept without a follower."""

from __future__ import annotations

from cache_texts import Text
from cache_world import World, make_world

from vlm_serve.engine.features.mirror import SECONDS, RecentChanges, TreeMirror

TEXT = Text(list(range(10, 19)))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def admit(world: World) -> None:
    match = world.match(TEXT)
    run = world.start(TEXT)
    assert run is not None
    world.cache.record(run.lease, match, len(TEXT))
    assert world.step(run, len(TEXT))
    world.close(run)


def test_a_step_is_summed_up_by_kind() -> None:
    world = make_world()
    mirror, clock = TreeMirror(world.cache.events), Clock()
    mirror.recent = RecentChanges(clock)
    admit(world)
    mirror.publish()
    clock.now += 10
    admit(world)
    mirror.publish()
    nodes = mirror.listing().entries
    told = mirror.recent.latest()
    ((age, hit), (_, added), (_, ready), (late, again), *_) = told
    assert (age, late) == (10.0, 0.0)
    assert (hit.kind, hit.hit and hit.hit.boundary) == ("hit", 0)
    assert (added.kind, added.num_nodes) == ("node_added", len(nodes))
    assert added.num_tokens == sum(each.node.num_tokens for each in nodes)
    assert (ready.kind, ready.num_nodes) == ("snapshot_ready", 2)
    assert again.hit is not None and again.hit.boundary > 0
    assert mirror.recent.latest({TEXT.keys.root}) == told
    assert mirror.recent.latest({b"another root"}) == []


def test_it_is_bounded_in_number_and_age() -> None:
    world, clock = make_world(), Clock()
    mirror = TreeMirror(world.cache.events)
    mirror.recent = RecentChanges(clock, limit=4)
    for _ in range(3):
        admit(world)
        mirror.publish()
        clock.now += 1
    kept = mirror.recent.latest()
    assert len(kept) == 4
    clock.now += SECONDS
    assert mirror.recent.latest() == []
