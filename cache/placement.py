"""Positions of a prompt's state snapshots (docs/architecture.md#state): policy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from vlm_serve.cache.places import INTERVAL, LEARNED, PlaceTable
from vlm_serve.preprocess.identity.keys import PromptKeys

MAX_NEW_SNAPSHOTS = 8
"""Most snapshots that one request plans."""


class PromptMarks(Protocol):
    """The structure of a prompt; implemented by `Prompt`."""

    def __len__(self) -> int: ...
    @property
    def keys(self) -> PromptKeys: ...
    @property
    def media_ends(self) -> Sequence[int]: ...
    @property
    def message_ends(self) -> Sequence[int]: ...
    @property
    def system_end(self) -> int: ...
    @property
    def stable_end(self) -> int: ...


def plan_snapshots(
    prompt: PromptMarks,
    *,
    start: int,
    junction: int,
    interval: int,
    min_gain: int,
    first_row: int | None = None,
    learned: PlaceTable | None = None,
    max_new: int = MAX_NEW_SNAPSHOTS,
) -> tuple[tuple[int, str], ...]:
    """Choose the positions to snapshot, most important first, each with its kind.

    The order is:
    1. the end of the last media item, then the junction;
    2. the prompt's end and, if its log-probabilities are reported, where those of another
      continuation can start;
    3. the stable end, then the ends of earlier media items, deepest first;
    4. the system message and the last two messages;
    5. the regular points: the learned ones, then those of the interval, as far as the budget of
       rows allows them.

    Only the last of the media ends comes first, so that a prompt with many pictures still gets a
    snapshot at its own end.

    Args:
        prompt: marks and keys of the whole prompt.
        start: cached tokens; there is a snapshot there, or it is 0.
        junction: where KV ends beyond the state; 0 for none.
        interval: tokens between regular points; a point inside a span moves down. If there are too
            many points, they are thinned out evenly.
        min_gain: tokens by which a message or regular point must lie past the snapshot before it.
        first_row: the first token whose log-probability is reported; None: none is.
        learned: knowledge of such prompts; None: nothing.
        max_new: most positions to return.

    Returns:
        (position, kind) with `start < position < len(prompt)`, each a cut point outside spans;
        kinds are "media", "junction", "prompt_end", "logprobs", "stable_end", "system",
        "message", "learned" and "interval".
    """
    assert interval > 0 and max_new >= 0
    keys = prompt.keys
    plan = _Plan(keys, start, len(prompt) - 1, max_new)
    end = keys.last_cut(len(prompt) - 1)
    stable = keys.last_cut(min(prompt.stable_end, len(prompt) - 1))
    plan.add(prompt.media_ends[-1:], "media")
    plan.add([junction], "junction")
    plan.add([end], "prompt_end")
    if first_row is not None:
        # The row of a token is computed at the token before it, so stop one cut point earlier.
        plan.add([keys.last_cut((first_row if first_row > 1 else end) - 1)], "logprobs")
    if stable // keys.block_size != end // keys.block_size:
        plan.add([stable], "stable_end")
    plan.add(reversed(prompt.media_ends[:-1]), "media")
    plan.add([prompt.system_end], "system", min_gain)
    plan.add(prompt.message_ends[-2:], "message", min_gain)
    left = plan.room
    if learned is not None:
        places = [each.position(len(prompt), keys.block_size) for each in learned.places]
        plan.add_learned([keys.last_cut(place) for place in places if place > 0], min_gain)
        left = plan.room if learned.intervals_pay(interval) else 0
    regular = range(start // interval * interval + interval, len(prompt), interval)
    points = sorted({keys.last_cut(point) for point in regular} - plan.chosen.keys())
    left = min(left, plan.room)
    spread = max(1, -(-len(points) // max(1, left)))
    plan.add(points[spread - 1 :: spread][:left], INTERVAL, min_gain)
    return tuple(plan.chosen.items())


class _Plan:
    """Positions chosen so far."""

    def __init__(self, keys: PromptKeys, start: int, last: int, max_new: int) -> None:
        self.chosen: dict[int, str] = {}
        self._keys = keys
        self._start = start
        self._last = last
        self._max_new = max_new

    @property
    def room(self) -> int:
        return self._max_new - len(self.chosen)

    def add(self, positions: Iterable[int], kind: str, min_gain: int = 0) -> None:
        """Add the positions that are allowed, new, and far enough past the one before them."""
        for position in positions:
            possible = self._start < position <= self._last
            if not possible or position in self.chosen or self.room <= 0:
                continue
            if self._keys.last_cut(position) != position:
                continue
            before = max((p for p in self.chosen if p < position), default=0)
            if position - max(before, self._start) >= min_gain:
                self.chosen[position] = kind

    def add_learned(self, positions: Iterable[int], min_gain: int) -> None:
        """Add learned positions, far enough past the one before them; they may be close together,
        because the programme has weighed that."""
        others = [self._start, *(p for p in self.chosen)]
        for position in positions:
            before = max((p for p in others if p < position), default=position)
            if position - before >= min_gain:
                self.add([position], LEARNED)
