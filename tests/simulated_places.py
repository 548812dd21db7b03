"""Learned places in the simulation: any, because places decide hits alone."""

from __future__ import annotations

import random

from vlm_serve.cache.placement import MOST_PLACES, LearnedPlace
from vlm_serve.cache.prefix_cache import PrefixCache


def plant(rng: random.Random, cache: PrefixCache) -> None:
    """Sometimes replace the learned places: prompts of some blocks teach little by themselves."""
    for group in cache.places._groups.values() if rng.random() < 0.02 else ():
        group.places = tuple(
            LearnedPlace(rng.randrange(24), from_end=rng.random() < 0.5)
            for _ in range(rng.randint(0, MOST_PLACES))
        )
