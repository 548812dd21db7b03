"""Settings of the garbage collector for a process that serves."""

from __future__ import annotations

import gc

COLLECTIONS_BEFORE_A_FULL_ONE = 100
"""Threshold of the garbage collector's oldest generation; Python's default is 10."""


def freeze_startup_objects() -> None:
    """Exempt the objects that exist at startup from garbage collection.

    These are half a million objects of libraries and the model. A full collection of them stops
    every thread for 0.2 s, repeatedly while requests come and go. Collecting newer objects,
    mostly the cache's nodes, takes 20 to 70 ms. It is done ten times less often than by default,
    and when the server is quiet (`upkeep`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], COLLECTIONS_BEFORE_A_FULL_ONE)
