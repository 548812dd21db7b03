"""Positions of a prompt's state snapshots (docs/architecture.md#state): policy only.

A prompt's marks name most positions. `Places` learns, by tenant, where else snapshots pay: where
prompts part from what is known, and which of the planned snapshots anybody asks for.

A *want* is the first prompt that parts from another one's path at a cut point: it starts from a
snapshot there, or would have. Whether there was one does not matter, so nothing has to be tried
out. Counts decay by observations; nothing here reads a clock.

Places are chosen by these partings. The problem is that of arXiv 2605.05219: prompts part at known
depths with known weights, a request starts again from the deepest snapshot before that point, and
each snapshot has a price.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

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
    learned: Sequence[LearnedPlace] = (),
    max_new: int = MAX_NEW_SNAPSHOTS,
) -> tuple[tuple[int, str], ...]:
    """Choose the positions to snapshot, most important first, each with its kind.

    The order is:
    1. the request's own marks, deepest first, the end of the last media item, then the junction;
    2. the prompt's end and, if its log-probabilities are reported, where those of another
      continuation can start;
    3. the stable end, then the ends of earlier media items, deepest first;
    4. the system message and the last two messages;
    5. the regular points: the learned ones, then those of the interval, as far as the budget of
       rows allows them;
    6. the last few ends of blocks before the prompt's end, if at least an interval is computed:
       they cost a copy each, and the first prompt that asks something else about the same text
       parts there.

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
        learned: the places learned of such prompts, the best one first.
        max_new: most positions to return.

    Returns:
        (position, kind) with `start < position < len(prompt)`, each a cut point outside spans;
        kinds are "mark", "media", "junction", "prompt_end", "logprobs", "stable_end", "system",
        "message", "learned", "interval" and "near_end".
    """
    assert interval > 0 and max_new >= 0
    keys = prompt.keys
    plan = _Plan(keys, start, len(prompt) - 1, max_new)
    end = keys.last_cut(len(prompt) - 1)
    stable = keys.last_cut(min(prompt.stable_end, len(prompt) - 1))
    plan.add(reversed(keys.marks), "mark")
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
    places = [place.position(len(prompt), keys.block_size) for place in learned]
    plan.add_learned([keys.last_cut(place) for place in places if place > 0], min_gain)
    regular = range(start // interval * interval + interval, len(prompt), interval)
    points = sorted({keys.last_cut(point) for point in regular} - plan.chosen.keys())
    spread = max(1, -(-len(points) // max(1, plan.room)))
    plan.add(points[spread - 1 :: spread][: plan.room], INTERVAL, min_gain)
    if len(prompt) - start >= interval:
        step = max(keys.block_size, _NEAR_END_STEP)
        before = range(end // step * step, start, -step)
        plan.add(
            [keys.last_cut(point) for point in before if point < end][:MOST_NEAR_END], NEAR_END
        )
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
        because their choice has weighed that."""
        others = [self._start, *(p for p in self.chosen)]
        for position in positions:
            before = max((p for p in others if p < position), default=position)
            if position - before >= min_gain:
                self.add([position], LEARNED)


Column = npt.NDArray[np.float64]
_NEAR, _SUPPORT = 4, 1.8
"""A place needs so many wants, decayed, within so many blocks: a single one does not come again."""
INTERVAL, LEARNED = "interval", "learned"
NEAR_END = "near_end"
"""Kind of snapshots that nothing is expected of: they stay until anybody needs their rows."""
REGULAR = frozenset({INTERVAL, LEARNED, NEAR_END})
"""Kinds of snapshots without a mark in the prompt."""
MOST_NEAR_END, _NEAR_END_STEP = 3, 64
"""Number for a prompt, and tokens between them: chunks of the recurrences end there anyway."""
MOST_PLACES = 7
"""Maximum number of learned places of a prompt."""
MOST_GROUPS, MOST_WANTS = 64, 64
"""Remembered tenants, most recent ones first, and wants of each."""

_DECAY = 0.995
"""Weight of all earlier counts after each further prompt."""
_LEAST_WANTS, _LEAST_PROMPTS = 4.0, 32
"""A group keeps to the fixed interval as long as it has fewer of both."""
_SOLVE_WANTS, _SOLVE_PROMPTS = 16, 32
"""Places are chosen again after so many wants (at first after a quarter of those known), and at
the latest after so many prompts."""
_LEAST_TOKENS = 8.0
"""Tokens of a prompt with about the cost of a row."""
_PRIOR, _REGULAR_PRIOR = 4.0, 0.25
"""Snapshots of each kind at a new group's beginning, all of them wanted; of regular kinds so many:
these have to show first that anybody parts where nothing in the prompt says so."""
_LEAST_WINDOW, _MOST_WINDOW = 32, 256
_FIRST_GAP, _FIRST_WEIGHT, _GAP_DECAY = 20.0, 4096.0, 0.99
"""The gap of reuse before anything was reused, in prompts; the tokens that speak for it; the weight
of all earlier ones after each further reuse."""
_HORIZON, _LEAST_HORIZON = 0.25, 4.0
"""The horizon as a part of the mean gap of reuse, and at least, in prompts. Gaps have a long tail:
most reuse comes much sooner than their mean says. Neither a few conversations nor thousands of them
lose by this part (benchmarks/reuse.py)."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Places along one axis.

    Attributes:
        ranked: in blocks along the axis, by savings, the most first.
        left: blocks lost by each want.
        gain: blocks saved, times weight.
    """

    ranked: list[int]
    left: Column
    gain: float


def choose_places(
    at: Column, lost: Column, weight: Column, most: int, price: float = 0.0
) -> Solution:
    """Choose places one after another, each time the one with the most blocks saved.

    A want is served by the deepest place not behind it, and then loses at most the blocks in
    between. Only places of wants are considered: moving a place deeper up to the next want never
    loses anything. What a place saves never grows with others, so the greedy choice saves at least
    63 % of what the best one does (Nemhauser, Wolsey and Fisher, 1978).

    Args:
        at: the place of each want along some axis, in blocks. Several may share one.
        lost: blocks to compute again without a place.
        weight: number of prompts with that want; decayed, so no integer.
        most: maximum number of places.
        price: savings due from each place, in blocks times weight.
    """
    places = np.unique(at)
    behind = at - places[:, None]  # [places, wants]
    near = ((behind >= 0) & (behind <= _NEAR)) @ weight
    places, behind = places[near >= _SUPPORT], behind[near >= _SUPPORT]
    behind[behind < 0] = np.inf
    ranked: list[int] = []
    left = lost
    for _ in range(min(most, len(places))):
        gains = np.maximum(left - behind, 0.0) @ weight
        best = gains.argmax()
        if gains[best] <= price:
            break
        ranked.append(int(places[best]))
        left = np.minimum(left, behind[best])
    return Solution(ranked, left, float((lost - left) @ weight))


@dataclass(frozen=True, slots=True)
class LearnedPlace:
    """A regular place of every prompt of a group.

    Attributes:
        blocks: its distance, in blocks.
        from_end: the distance is one from the last boundary before the prompt's end.
    """

    blocks: int
    from_end: bool

    def position(self, length: int, block_size: int) -> int:
        """Return the multiple of the block size that it stands for in a prompt of this length; it
        may lie outside of the prompt."""
        last = length // block_size
        return (last - self.blocks if self.from_end else self.blocks) * block_size


@dataclass(eq=False, slots=True)
class Planned:
    """Plans of a request; its nodes refer to them.

    Attributes:
        start: tokens from the cache.
        length: of its prompt, in tokens.
        kinds: by planned position.
        parted: number of prompts parting from its path, by position.
        used: planned positions from which such a prompt starts, or would.
        number: of its prompt, in order of admission.
    """

    group: _Group
    start: int
    length: int
    kinds: dict[int, str]
    number: int
    parted: dict[int, int] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)

    def before(self, position: int, *, regular: bool) -> int:
        """Return the last planned position up to this one, with or without the regular ones; the
        start if there is none."""
        earlier = (
            place
            for place, kind in self.kinds.items()
            if place <= position and (regular or kind not in REGULAR)
        )
        return max(earlier, default=self.start)


@dataclass(slots=True)
class _Want:
    """Prompts that parted alike: their decayed number at prompt `stamp`, and the blocks that each
    of them computes again without regular places."""

    weight: float = 0.0
    lost: float = 0.0
    stamp: int = 0


@dataclass(slots=True, eq=False)
class Share:
    """The share of a group's snapshots of one kind that prompts wanted: the uses expected of each,
    as of now."""

    planned: float = _PRIOR
    wanted: float = _PRIOR

    def add(self, *, wanted: bool) -> None:
        self.planned = _DECAY * self.planned + 1
        self.wanted = _DECAY * self.wanted + wanted

    def __float__(self) -> float:
        return min(1.0, self.wanted / self.planned)


@dataclass(eq=False, slots=True)
class _Group:
    """What is known of a tenant's prompts.

    Attributes:
        prompts: number so far; the stamps of wants count by it.
        fresh: decayed number of prompts with so many new tokens that regular places matter.
        wants: by blocks before the place, and blocks behind it.
        shares: of the snapshots of each kind, how many were wanted.
        news, known: wants since places were last chosen, and before that.
        solved: prompts at that time.
    """

    prompts: int = 0
    fresh: float = 0.0
    wants: dict[tuple[int, int], _Want] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)
    places: tuple[LearnedPlace, ...] = ()
    news: int = 0
    known: int = 0
    solved: int = 0

    def weight(self, want: _Want) -> float:
        return want.weight * float(_DECAY ** (self.prompts - want.stamp))

    def add(self, depth: int, distance: int, lost: float) -> None:
        """Count a want; if there are too many different ones, forget the least."""
        key = depth, distance
        if key not in self.wants and len(self.wants) >= MOST_WANTS:
            del self.wants[min(self.wants, key=lambda want: self.weight(self.wants[want]))]
        want = self.wants.setdefault(key, _Want())
        weight = self.weight(want)
        want.lost = (want.lost * weight + lost) / (weight + 1)
        want.weight, want.stamp = weight + 1, self.prompts
        self.news += 1

    def share(self, kind: str) -> Share:
        if kind not in self.shares:
            self.shares[kind] = Share(wanted=_REGULAR_PRIOR if kind in REGULAR else _PRIOR)
        return self.shares[kind]

    @property
    def due(self) -> bool:
        """True if places should be chosen again."""
        enough = min(_SOLVE_WANTS, max(1, self.known // 4))
        return self.news >= enough or self.prompts - self.solved >= _SOLVE_PROMPTS

    def solve(self, block_size: int) -> None:
        """Choose places along both axes, from the start and from the end: the better one's, and the
        other one's for what those leave."""
        self.known, self.news, self.solved = self.known + self.news, 0, self.prompts
        wants = [(*key, want.lost, self.weight(want)) for key, want in self.wants.items()]
        depths, distances, lost, weight = np.array(wants, np.float64).reshape(-1, 4).T
        if weight.sum() < _LEAST_WANTS and self.prompts < _LEAST_PROMPTS:
            return
        axes = {False: depths, True: -distances}
        least = _LEAST_TOKENS / block_size * self.fresh
        solutions = {
            axis: choose_places(at, lost, weight, MOST_PLACES, least) for axis, at in axes.items()
        }
        from_end = solutions[True].gain >= solutions[False].gain
        first = solutions[from_end]
        most = MOST_PLACES - len(first.ranked)
        second = choose_places(axes[not from_end], first.left, weight, most, least)
        self.places = (
            *(LearnedPlace(abs(at), from_end) for at in first.ranked),
            *(LearnedPlace(abs(at), not from_end) for at in second.ranked),
        )


class Places:
    """Observes prompts and finds places for regular snapshots of the next ones.

    Args:
        block_size: tokens per block.
        rows: budget of snapshots.
        least_gain: least savings of a junction, in tokens.
        learned: False: nobody gets anything but the fixed interval.
    """

    def __init__(
        self, block_size: int, rows: int, least_gain: int, *, learned: bool = True
    ) -> None:
        self.learned = learned
        self._block_size = block_size
        self._least_gain = least_gain
        self._groups: OrderedDict[bytes, _Group] = OrderedDict()
        # What nobody has asked for within as many prompts as there are rows would be evicted. In a
        # large cache a share would follow too late if it waited for that.
        self._window = min(_MOST_WINDOW, max(_LEAST_WINDOW, rows))
        self._recent: deque[Planned] = deque()
        self._count = 0
        self._gaps, self._weight = _FIRST_GAP * _FIRST_WEIGHT, _FIRST_WEIGHT

    # What follows

    @property
    def horizon(self) -> float:
        """Prompts after which reuse mostly comes: a part of the mean number of prompts between one
        and those that part from its path, weighted by the tokens that these have of it."""
        return max(_LEAST_HORIZON, _HORIZON * self._gaps / self._weight)

    def of(self, owner: bytes) -> tuple[LearnedPlace, ...]:
        """Return the places of a tenant's prompts, the best one first."""
        group = self._groups.get(owner) if self.learned else None
        return () if group is None else group.places

    def expected(self, planned: Planned | None, kind: str) -> float | Share:
        """Return the uses expected of a snapshot of this kind: a number, or the share that tells
        it."""
        if kind == NEAR_END:
            return 0.0
        return 1.0 if planned is None or not self.learned else planned.group.share(kind)

    def is_junction(self, planned: Planned, position: int, gain: int) -> bool:
        """Return True if prompts part so often at a position that a snapshot there pays, although
        each of them saves only `gain` tokens."""
        times = planned.parted.get(position, 0) if self.learned else 0
        return times > 0 and (times + 1) * gain >= self._least_gain

    # Observations

    def plan(self, owner: bytes, start: int, length: int, positions: Mapping[int, str]) -> Planned:
        """Note what a request plans: its snapshots by position, each with its kind. Whoever parts
        from its path later tells of these places."""
        group = self._groups.setdefault(owner, _Group())
        self._groups.move_to_end(owner)
        if len(self._groups) > MOST_GROUPS:
            self._groups.popitem(last=False)
        group.prompts += 1
        group.fresh = _DECAY * group.fresh + (length - start >= self._least_gain)
        self._count += 1
        counted = {place: kind for place, kind in positions.items() if kind != NEAR_END}
        planned = Planned(group, start, length, counted, self._count)
        self._recent.append(planned)
        if len(self._recent) > self._window:
            self._forget(self._recent.popleft())
        if group.due:
            group.solve(self._block_size)
        return planned

    def parted(self, planned: Planned, position: int) -> None:
        """Count a prompt that shares a request's path up to a position, and no more of it."""
        if position > planned.length:
            return  # it parts in the answer, where no place of a prompt is
        times = planned.parted[position] = planned.parted.get(position, 0) + 1
        if times > 1:
            return
        group, kind = planned.group, planned.kinds.get(position)
        gained = position - planned.start
        if gained > 0:
            self._gaps = _GAP_DECAY * self._gaps + gained * (self._count - planned.number)
            self._weight = _GAP_DECAY * self._weight + gained
        serving = planned.before(position, regular=True)
        if serving in planned.kinds and serving not in planned.used:
            planned.used.add(serving)
            group.share(planned.kinds[serving]).add(wanted=True)
        lost = position - planned.before(position, regular=False)
        if (kind is None or kind in REGULAR) and lost > 0:
            size = self._block_size
            depth = position // size
            group.add(depth, planned.length // size - depth, lost / size)

    def _forget(self, planned: Planned) -> None:
        """Count the planned snapshots without use in time."""
        for position, kind in planned.kinds.items():
            if position not in planned.used:
                planned.group.share(kind).add(wanted=False)
