"""The head of the queue is matched again when the cache has changed, and not before."""

from __future__ import annotations

from unittest.mock import patch

from scheduling import World


def test_the_waiting_head_is_matched_once_per_change_of_the_cache() -> None:
    """The second fits when the first, whose answer fills a block every 8 steps, has ended."""
    world = World(num_blocks=10)
    world.submit(5, length=20, max_tokens=30)
    world.submit(6, length=70, max_tokens=1)
    world.run(world.plan())
    matches: list[int] = []
    version = None
    with patch.object(world.cache, "match", wraps=world.cache.match) as match:
        while len(world.scheduler.waiting) == 1:
            changed = world.cache.version != version
            plan = world.plan()
            version = world.cache.version
            matches.append(match.call_count - sum(matches))
            assert matches[-1] == changed
            world.run(plan)
    assert len(matches) == 30 and matches[-1], "it runs as soon as the first has ended"
    assert 3 <= sum(matches) <= 10
