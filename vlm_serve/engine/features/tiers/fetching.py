"""Has waiting sequences wait for entries of lower cache tiers, once per admission."""

from __future__ import annotations

from typing import NamedTuple

from vlm_serve.cache.matching import Match
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.tier_fetching import TierFetcher
from vlm_serve.cache.tiers.lookup import Segment
from vlm_serve.engine.core.hooks import Admission, Hooks
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup


class _Fetched(NamedTuple):
    """Result of a fetch. If `failed`, an existing entry could not be read or published."""

    segments: tuple[Segment, ...]
    failed: bool


class Fetching:
    """Asks the lower tiers for the rest of a prompt before its sequence is admitted.

    Args:
        fetcher: decides what to load.
        hooks: features that are told when something has come.
        cache: of the device.
    """

    def __init__(self, fetcher: TierFetcher, hooks: Hooks, cache: PrefixCache) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._hooks = hooks
        self._fetched: dict[int, _Fetched] = {}

    def may_use(self, sequence: Sequence, match: Match, least: int) -> bool:
        """Return False while a fetch for a sequence is on its way; begin it the first time."""
        if sequence.number in self._fetched or sequence.fetching:
            return not sequence.fetching

        keys = sequence.keys

        def arrived(segments: tuple[Segment, ...], failed: bool) -> None:
            sequence.fetching = False
            if sequence.answer.finish_reason is None and sequence.keys is keys:
                self._fetched[sequence.number] = _Fetched(segments, failed)
            for notice in self._hooks.on_fetched:
                notice(sequence)

        sequence.fetching = self._fetcher.ask(
            sequence.keys, match, match.limit, arrived, sequence.patience, least=least
        )
        return not sequence.fetching

    def may_extend(self, blocks: int, rows: int) -> str:
        """Return "tiers" if something has to be evicted, which is copied first."""
        cache = self._cache
        free = blocks <= cache.free_block_count and rows <= cache.free_row_count
        return "" if free else "tiers"

    def on_matched(self, admission: Admission) -> None:
        """Report what has come, and what should have."""
        fetched = self._fetched.pop(admission.sequence.number, None)
        if fetched is None:
            return
        admission.fetched = fetched.segments
        if fetched.failed and admission.reason != "full":
            admission.reason = "tier_error"

    def on_rekeyed(self, group: SequenceGroup) -> None:
        """Forget what has come under other keys. What is on its way serves nobody here."""
        for sequence in group.sequences:
            self._fetched.pop(sequence.number, None)

    def on_ended(self, sequence: Sequence) -> None:
        """Forget a sequence that was never admitted."""
        self._fetched.pop(sequence.number, None)
