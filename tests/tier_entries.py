"""Entries of lower cache tiers for tests, and questions to a stack of tiers."""

from __future__ import annotations

import random

from vlm_serve.cache.tiers.entry import Entry, EntryId, Kind, Origin, Sealed, seal
from vlm_serve.cache.tiers.stack import TierStack

ORIGIN = Origin(bytes(range(32)))


def entry(number: int, size: int = 1000, kind: Kind = Kind.KV) -> Entry:
    payload = random.Random(number).randbytes(size)
    return Entry(EntryId(kind, number.to_bytes(32, "big")), 16, True, "float32[4,2]", payload)


def locate(tiers: TierStack, *numbers: int) -> list[str | None]:
    """Where entries are."""
    ids = [entry(number).id for number in numbers]
    places = tiers.submit(tiers.locate(ids)).result()
    return [places.get(entry_id) for entry_id in ids]


def get(tiers: TierStack, number: int) -> Entry | None:
    entry_id = entry(number).id
    found = tiers.submit(tiers.get([entry_id])).result()
    assert found.keys() <= {entry_id}
    return found.get(entry_id)


def sealed(*numbers: int, size: int = 1000) -> dict[EntryId, Sealed]:
    return {entry(n).id: seal(entry(n, size), ORIGIN) for n in numbers}
