"""Positions of a prompt's state snapshots (docs/architecture.md#state): policy only.

A prompt's marks name most positions. `Places` learns, by tenant, where else snapshots pay: where
prompts part from what is known, and which of the planned snapshots anybody asks for.

A *want* is the first prompt that parts from another one's path at a cut point: it starts from a
snapshot there, or would have. Whether there was one does not matter, so nothing has to be tried
out. Counts decay by observations; nothing here reads a clock.

A dynamic programme over these partings chooses the places. The problem is that of arXiv 2605.05219:
prompts part at known depths with known weights, a request starts again from the deepest snapshot
before that point, and each snapshot has a price.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

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
    1. the request's own marks, deepest first, the end of the last media item, then the junction;
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
        kinds are "mark", "media", "junction", "prompt_end", "logprobs", "stable_end", "system",
        "message", "learned" and "interval".
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
    left = plan.room
    if learned is not None:
        places = [place.position(len(prompt), keys.block_size) for place in learned.places]
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


MAX_BINS = 32
"""Maximum number of bins of one run; time grows with their square."""
_NEAR, _SUPPORT = 4, 1.8
"""A place needs so many wants, decayed, within so many blocks: a single one does not come again."""
INTERVAL, LEARNED = "interval", "learned"
REGULAR = frozenset({INTERVAL, LEARNED})
"""Kinds of snapshots without a mark in the prompt."""
MOST_PLACES = 7
"""Maximum number of learned places of a prompt."""
MOST_GROUPS, MOST_WANTS = 64, 64
"""Remembered tenants, most recent ones first, and wants of each."""

_DECAY = 0.995
"""Weight of all earlier counts after each further prompt."""
_LEAST_WANTS, _LEAST_PROMPTS = 4.0, 32
"""A group keeps to the fixed interval as long as it has fewer of both."""
_SOLVE_WANTS, _SOLVE_PROMPTS = 16, 32
"""The programme runs again after so many wants (at first after a quarter of those known), and at
the latest after so many prompts."""
_LEAST_TOKENS = 8.0
"""Tokens of a prompt with about the cost of a row."""
_PRIOR = 4.0
"""Snapshots of each kind at a new group's beginning, all of them wanted."""
_LEAST_HORIZON, _MOST_HORIZON = 32, 1024


@dataclass(frozen=True, slots=True)
class Bin:
    """Prompts with one place of parting.

    Attributes:
        at: the place, in blocks along some axis.
        lost: blocks to compute again by such a prompt without a place.
        weight: number of these prompts; decayed, so no integer.
        possible: it may be chosen. It is served in any case.
    """

    at: int
    lost: float
    weight: float
    possible: bool = True


@dataclass(frozen=True, slots=True)
class Solution:
    """Places along one axis.

    Attributes:
        ranked: by savings, the most first.
        left: blocks lost by each bin.
        gain: blocks saved, times weight.
    """

    ranked: list[int]
    left: list[float]
    gain: float


def choose_places(bins: Sequence[Bin], most: int, price: float = 0.0) -> list[int]:
    """Return the places with the most blocks saved, ascending.

    A bin is served by the deepest chosen place not behind it, and then loses at most
    the blocks in between. Only places of bins are considered: moving a place deeper up to the next
    bin never loses anything.

    Args:
        bins: in any order, at most one for each place.
        most: maximum number of places.
        price: savings due from each further place, in blocks times weight.
    """
    ordered = sorted(bins, key=lambda prompts: prompts.at)
    count = len(ordered)
    served = [_served(ordered[first:]) for first in range(count)]
    possible = [index for index in range(count) if ordered[index].possible]
    ends = [*possible, count]
    best, total, start = [0.0] * (count + 1), 0.0, count
    steps: list[list[int]] = []
    """For 1, 2, ... places: the next place behind each bin that is the first of them."""
    for _ in range(min(most, len(possible))):
        gains, nexts = [0.0] * (count + 1), [count] * count
        for index, first in enumerate(possible):
            for end in ends[index + 1 :]:
                gain = served[first][end - first - 1] + best[end]
                if gain > gains[first]:
                    gains[first], nexts[first] = gain, end
        first = max(possible, key=gains.__getitem__)
        if gains[first] - total <= price:
            break
        total, start, best = gains[first], first, gains
        steps.append(nexts)
    places: list[int] = []
    for nexts in reversed(steps):
        if start == count:
            break
        places.append(ordered[start].at)
        start = nexts[start]
    return places


def solve(wants: Sequence[Bin], most: int, price: float) -> Solution:
    """Choose places for wants along an axis, several perhaps at one place."""
    places = choose_places(merged(wants), most, price)
    left = remaining(wants, places)
    saved = dict.fromkeys(places, 0.0)
    for want, lost in zip(wants, left, strict=True):
        if lost < want.lost:
            place = max(place for place in places if place <= want.at)
            saved[place] += want.weight * (want.lost - lost)
    ranked = sorted(places, key=lambda place: -saved[place])
    return Solution(ranked, left, sum(saved.values()))


def merged(wants: Iterable[Bin]) -> list[Bin]:
    """Return one bin for each place, of the most important places only. Those with too few wants
    nearby are not possible."""
    sums: dict[int, tuple[float, float]] = {}
    for want in wants:
        weight, lost = sums.get(want.at, (0.0, 0.0))
        sums[want.at] = weight + want.weight, lost + want.weight * want.lost
    bins = []
    for at, (weight, lost) in sums.items():
        near = sum(
            near_weight for other, (near_weight, _) in sums.items() if at <= other <= at + _NEAR
        )
        if lost > 0:
            bins.append(Bin(at, lost / weight, weight, possible=near >= _SUPPORT))
    return sorted(bins, key=lambda place_bin: -place_bin.weight * place_bin.lost)[:MAX_BINS]


def remaining(bins: Sequence[Bin], places: Sequence[int]) -> list[float]:
    """Return the blocks lost by each bin with these places."""
    lost = []
    for prompts in bins:
        behind = [prompts.at - place for place in places if place <= prompts.at]
        lost.append(min([prompts.lost, *behind]))
    return lost


def _served(bins: Sequence[Bin]) -> list[float]:
    """Return the gain of a place at the first bin for the first one, two, ... bins."""
    at = bins[0].at
    return list(
        accumulate(prompts.weight * max(0.0, prompts.lost - (prompts.at - at)) for prompts in bins)
    )


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


@dataclass(frozen=True, slots=True)
class PlaceTable:
    """What a group has learned.

    Attributes:
        places: the best one first.
        price: tokens that a row has to save, because what is evicted for it would have.
        interval_share: share of wanted snapshots of the fixed interval.
    """

    places: tuple[LearnedPlace, ...]
    price: float
    interval_share: float

    def intervals_pay(self, interval: int) -> bool:
        """Return True if snapshots of an interval, in tokens, are expected to be worth a row."""
        return self.interval_share * interval >= self.price


@dataclass(eq=False, slots=True)
class Planned:
    """Plans of a request; its nodes refer to them.

    Attributes:
        start: tokens from the cache.
        length: of its prompt, in tokens.
        kinds: by planned position.
        parted: number of prompts parting from its path, by position.
        used: planned positions from which such a prompt starts, or would.
    """

    group: _Group
    start: int
    length: int
    kinds: dict[int, str]
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


@dataclass(slots=True)
class _Share:
    planned: float = _PRIOR
    wanted: float = _PRIOR

    def add(self, *, wanted: bool) -> None:
        self.planned = _DECAY * self.planned + 1
        self.wanted = _DECAY * self.wanted + wanted

    @property
    def value(self) -> float:
        return min(1.0, self.wanted / self.planned)


@dataclass(eq=False, slots=True)
class _Group:
    """What is known of a tenant's prompts.

    Attributes:
        prompts: number so far; the stamps of wants count by it.
        fresh: decayed number of prompts with so many new tokens that regular places matter.
        wants: by blocks before the place, and blocks behind it.
        shares: of the snapshots of each kind, how many were wanted.
        news, known: wants since the programme last ran, and before that.
        solved: prompts at the last run.
    """

    prompts: int = 0
    fresh: float = 0.0
    wants: dict[tuple[int, int], _Want] = field(default_factory=dict)
    shares: dict[str, _Share] = field(default_factory=dict)
    table: PlaceTable | None = None
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

    def share(self, kind: str) -> _Share:
        return self.shares.setdefault(kind, _Share())

    @property
    def due(self) -> bool:
        """True if the programme should run again."""
        enough = min(_SOLVE_WANTS, max(1, self.known // 4))
        return self.news >= enough or self.prompts - self.solved >= _SOLVE_PROMPTS

    def solve(self, price: float, block_size: int) -> None:
        """Run the programme along both axes, from the start and from the end, and take the better
        one's places; the other one's for what those leave.

        Args:
            price: least savings of a row, in tokens.
        """
        self.known, self.news, self.solved = self.known + self.news, 0, self.prompts
        wants = [(key, self.weight(want), want.lost) for key, want in self.wants.items()]
        if sum(weight for _, weight, _ in wants) < _LEAST_WANTS and self.prompts < _LEAST_PROMPTS:
            return
        axes = {
            False: [Bin(depth, lost, weight) for (depth, _), weight, lost in wants],
            True: [Bin(-distance, lost, weight) for (_, distance), weight, lost in wants],
        }
        least = price / block_size * self.fresh
        solutions = {axis: solve(bins, MOST_PLACES, least) for axis, bins in axes.items()}
        from_end = solutions[True].gain >= solutions[False].gain
        first = solutions[from_end]
        left = [
            Bin(other.at, lost, other.weight)
            for other, lost in zip(axes[not from_end], first.left, strict=True)
        ]
        second = solve(left, MOST_PLACES - len(first.ranked), least)
        places = [
            *(LearnedPlace(abs(at), from_end) for at in first.ranked),
            *(LearnedPlace(abs(at), not from_end) for at in second.ranked),
        ]
        self.table = PlaceTable(tuple(places), price, self.share(INTERVAL).value)


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
        # What nobody has asked for within as many prompts as there are rows would be evicted.
        self._horizon = min(_MOST_HORIZON, max(_LEAST_HORIZON, rows))
        self._recent: deque[Planned] = deque()
        self._lost = self._evicted = 0.0

    # What follows

    @property
    def price(self) -> float:
        """Tokens that a row has to save: those computed again for each snapshot evicted of late, at
        least what a row costs."""
        return max(_LEAST_TOKENS, self._lost / max(1.0, self._evicted))

    def table(self, root: bytes) -> PlaceTable | None:
        """Return the knowledge of a tenant's prompts; None: use the fixed interval alone."""
        group = self._groups.get(root) if self.learned else None
        return None if group is None else group.table

    def expected(self, planned: Planned | None, kind: str) -> float:
        """Return the expected uses of a snapshot of this kind."""
        if planned is None or not self.learned or kind not in planned.group.shares:
            return 1.0
        return planned.group.shares[kind].value

    def is_junction(self, planned: Planned, position: int, gain: int) -> bool:
        """Return True if prompts part so often at a position that a snapshot there pays, although
        each of them saves only `gain` tokens."""
        times = planned.parted.get(position, 0) if self.learned else 0
        return times > 0 and (times + 1) * gain >= self._least_gain

    # Observations

    def plan(self, root: bytes, start: int, length: int, positions: Mapping[int, str]) -> Planned:
        """Note what a request plans: its snapshots by position, each with its kind. Whoever parts
        from its path later tells of these places."""
        group = self._groups.setdefault(root, _Group())
        self._groups.move_to_end(root)
        if len(self._groups) > MOST_GROUPS:
            self._groups.popitem(last=False)
        self._lost *= _DECAY
        self._evicted *= _DECAY
        group.prompts += 1
        group.fresh = _DECAY * group.fresh + (length - start >= self._least_gain)
        planned = Planned(group, start, length, dict(positions))
        self._recent.append(planned)
        if len(self._recent) > self._horizon:
            self._forget(self._recent.popleft())
        if group.due:
            group.solve(self.price, self._block_size)
        return planned

    def parted(self, planned: Planned, position: int) -> None:
        """Count a prompt that shares a request's path up to a position, and no more of it."""
        if position > planned.length:
            return  # it parts in the answer, where no place of a prompt is
        times = planned.parted[position] = planned.parted.get(position, 0) + 1
        if times > 1:
            return
        group, kind = planned.group, planned.kinds.get(position)
        serving = planned.before(position, regular=True)
        if serving in planned.kinds and serving not in planned.used:
            planned.used.add(serving)
            group.share(planned.kinds[serving]).add(wanted=True)
        lost = position - planned.before(position, regular=False)
        if (kind is None or kind in REGULAR) and lost > 0:
            size = self._block_size
            depth = position // size
            group.add(depth, planned.length // size - depth, lost / size)

    def evicted(self) -> None:
        """Count an evicted snapshot."""
        self._evicted += 1

    def missed(self, tokens: int) -> None:
        """Count tokens computed again because of an evicted snapshot."""
        self._lost += tokens

    def _forget(self, planned: Planned) -> None:
        """Count the planned snapshots without use in time."""
        for position, kind in planned.kinds.items():
            if position not in planned.used:
                planned.group.share(kind).add(wanted=False)
