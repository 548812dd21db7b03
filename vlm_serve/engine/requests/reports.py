"""Reports about a request's prompt: the source of each part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from vlm_serve.cache.listing import HASH_CHARACTERS
from vlm_serve.cache.matching import key_at
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.tiers.lookup import Segment
from vlm_serve.engine.requests.outputs import CacheReport, PromptMedia, PromptSegment
from vlm_serve.engine.requests.sequence import Sequence as EngineSequence
from vlm_serve.preprocess.identity.keys import PromptKeys
from vlm_serve.preprocess.identity.prompt import Prompt

COMPUTED = "computed"


def prompt_segments(
    boundary: int, length: int, fetched: Iterable[Segment]
) -> tuple[PromptSegment, ...]:
    """Split a prompt of `length` tokens, `boundary` of them reused, by source, in order and without
    gaps. Reused tokens that were not fetched from a lower tier count as "device"."""
    segments: list[PromptSegment] = []

    def add(end: int, source: str) -> None:
        start = segments[-1].end if segments else 0
        if end <= start:
            return
        if segments and segments[-1].source == source:
            start = segments.pop().start
        segments.append(PromptSegment(start, end, source))

    for first, last, tier in sorted(fetched):
        add(min(first, boundary), "device")
        add(min(last, boundary), tier)
    add(boundary, "device")
    add(length, COMPUTED)
    return tuple(segments)


def tokens_by_tier(segments: Sequence[PromptSegment]) -> dict[str, int]:
    """Count the tokens reused from each tier."""
    tokens: Counter[str] = Counter()
    for segment in segments:
        if segment.source != COMPUTED:
            tokens[segment.source] += segment.end - segment.start
    return dict(tokens)


def prompt_media(
    prompt: Prompt, boundary: int, encoded: Collection[int], recalled: Mapping[int, str]
) -> tuple[PromptMedia, ...]:
    """Describe the media spans of a prompt.

    Args:
        boundary: number of reused tokens; no span crosses it.
        encoded: starts of the spans that the vision tower encoded.
        recalled: tiers of the spans whose embeddings were fetched, by the spans' starts.
    """

    def source(start: int) -> str:
        if start in encoded:  # may have been reused before: the request was preempted
            return "encoded"
        if start in recalled:
            return recalled[start]
        return "reused" if start < boundary else "cached"

    media = prompt.media
    return tuple(
        PromptMedia(
            offset=span.start,
            length=span.end - span.start,
            kind=span.modality,
            hash=span.content_hash.hex()[:HASH_CHARACTERS],
            source=source(span.start),
            width=span.grid[2] * media[span.item].patch_size,
            height=span.grid[1] * media[span.item].patch_size,
            item=span.item,
            item_hash=media[span.item].name,
        )
        for span in prompt.spans
    )


def repeated_spans(prompt: Prompt) -> int:
    """Count the media spans with the content of an earlier span; they are encoded once."""
    return len(prompt.spans) - len({span.content_hash for span in prompt.spans})


def boundary_key(keys: PromptKeys, boundary: int) -> str | None:
    """Return the hexadecimal key of the node that ends at the boundary; None if nothing was
    reused."""
    return key_at(keys, boundary).hex() if boundary else None


def complete_report(cache: PrefixCache, sequence: EngineSequence) -> CacheReport | None:
    """Return the report of a request whose whole prompt has been computed, and count what it has
    written."""
    group, prompt = sequence.group, sequence.prompt
    if group.report is None:
        return None
    snapshots = cache.snapshot_positions(sequence.keys, len(prompt))
    deepest = cache.deepest_boundary(sequence.keys, len(prompt), snapshots)
    group.written_tokens = max(0, deepest - group.cached_tokens)
    encoded = {span.item for span in prompt.spans if span.start in group.encoded_spans}
    return replace(
        group.report,
        media_decoded=sum(item.decoded for item in prompt.media),
        media_encoded=len(encoded),
        media_skipped=len(prompt.media) - len(encoded),
        media_cut_short=sum(item.cut_short for item in prompt.media),
        media_repeated=repeated_spans(prompt),
        media=prompt_media(
            prompt, group.report.boundary, group.encoded_spans, group.recalled_spans
        ),
        snapshots=snapshots,
    )
