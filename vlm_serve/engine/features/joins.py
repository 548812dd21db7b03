"""Which waiting requests wait for a prefill that is running, instead of computing the same tokens.

A *follower* waits without a lease until its *leader*, which has one, has committed the *meeting
cut*: the deepest boundary that both prompts have. Who has a lease waits for nobody, so there are
no circles.

docs/architecture.md#prefixes-that-are-being-computed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from vlm_serve.cache.matching import Match, shared_cut
from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.cache.records import Node
from vlm_serve.engine.core.admission import Admitter
from vlm_serve.engine.core.hooks import Admission, CommittedRow
from vlm_serve.engine.core.queues import SequenceQueues
from vlm_serve.engine.requests.plan import Slice, StepOutput
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup

MAX_IDLE_STEPS = 4
"""Steps without progress of a leader after which its followers wait no longer."""
MAX_FRUITLESS_JOINS = 3
"""Joins of one request that may end without a deeper match, because leaders failed or no row was
free; after them it computes for itself."""


@dataclass(eq=False, slots=True)
class Join:
    """A waiting follower.

    Attributes:
        cut: the meeting cut, in tokens.
        boundary: depth of the follower's match when it joined.
        since: time of that, in seconds.
    """

    follower: Sequence
    leader: Sequence
    cut: int
    boundary: int
    since: float


@dataclass(slots=True)
class Waited:
    """What joining has brought a request until its first admission.

    Attributes:
        boundary: depth of its match before it first joined; None if it never did.
        seconds: time that it has waited for leaders.
    """

    boundary: int | None = None
    seconds: float = 0.0

    def report(self, boundary: int) -> tuple[int, float]:
        """Return the tokens that it has gained and the milliseconds that it has waited, if it is
        admitted with a match of this depth."""
        gained = 0 if self.boundary is None else max(0, boundary - self.boundary)
        return gained, round(1000 * self.seconds, 3)


@dataclass(slots=True)
class _History:
    """The joins of one request so far; a leader is joined at most once."""

    leaders: set[int] = field(default_factory=set)
    fruitless: int = 0
    waited: Waited = field(default_factory=Waited)
    last: Join | None = None
    expected: Node | None = None


@dataclass(slots=True)
class _Lead:
    """A leader with followers.

    Attributes:
        joins: by the followers' numbers.
        computed: its computed tokens at the last commit.
        idle: commits since then without progress.
        added: meeting cuts at which only followers want a snapshot.
    """

    leader: Sequence
    computed: int
    joins: dict[int, Join] = field(default_factory=dict)
    idle: int = 0
    added: set[int] = field(default_factory=set)


class _ByBeginning:
    """Sequences by their first blocks, as many as a join has to gain: only such of equal beginnings
    can meet. Shorter ones are left out.

    Args:
        blocks: length of the beginning.
    """

    def __init__(self, blocks: int) -> None:
        self._last = blocks - 1
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, dict[int, Sequence]] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.number in self._keys

    @property
    def all(self) -> Iterable[Sequence]:
        return (sequence for alike in self._by_key.values() for sequence in alike.values())

    def add(self, sequence: Sequence) -> bool:
        """Add a sequence; return False if it is too short."""
        blocks = sequence.keys.block_keys
        if len(blocks) <= self._last:
            return False
        key = self._keys[sequence.number] = blocks[self._last]
        self._by_key.setdefault(key, {})[sequence.number] = sequence
        return True

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is there."""
        key = self._keys.pop(sequence.number, None)
        if key is not None:
            alike = self._by_key[key]
            del alike[sequence.number]
            if not alike:
                del self._by_key[key]

    def like(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences with the same beginning."""
        blocks = sequence.keys.block_keys
        if len(blocks) <= self._last:
            return []
        return list(self._by_key.get(blocks[self._last], {}).values())


class Joins:
    """The running prefills, and who waits for them. Nothing here can be matched.

    Args:
        cache: prefix cache with the content that followers wait for.
        followers: the numbers of the followers, for the planner.
        clock: time in seconds, for reports only.
    """

    def __init__(
        self,
        cache: PrefixCache,
        followers: set[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._followers = followers
        self._clock = clock
        self._prefills = _ByBeginning(cache.config.min_snapshot_gain)
        self._waiting = _ByBeginning(cache.config.min_snapshot_gain)
        self._leads: dict[int, _Lead] = {}
        self._joins: dict[int, Join] = {}
        self._histories: dict[int, _History] = {}
        self._new_prefills: list[Sequence] = []
        self._new_waiting: dict[int, Sequence] = {}

    def __len__(self) -> int:
        """Return the number of followers."""
        return len(self._joins)

    def __contains__(self, sequence: Sequence) -> bool:
        """Return True if a sequence waits for a leader."""
        return sequence.number in self._joins

    @property
    def all(self) -> list[Join]:
        return list(self._joins.values())

    # Transitions of sequences

    def waits(self, sequence: Sequence) -> None:
        """Note a sequence at the begin of its wait for admission."""
        if self._waiting.add(sequence):
            self._new_waiting[sequence.number] = sequence

    def starts(self, sequence: Sequence) -> None:
        """Note that a sequence has got a lease; the use expected of it is its own now."""
        self._stop_waiting(sequence)
        history = self._histories.get(sequence.number)
        if history is not None:
            self._expect(history, None)
        assert (lease := sequence.lease) is not None
        shares = not lease.private and self._cache.config.enabled
        if sequence.prefilling and shares and self._prefills.add(sequence):
            self._new_prefills.append(sequence)

    def stops(self, sequence: Sequence) -> None:
        """Note that a sequence is about to lose its lease: its followers wait no longer."""
        self._prefills.remove(sequence)
        lead = self._leads.get(sequence.number)
        for join in list(lead.joins.values()) if lead is not None else ():
            self._end(join)

    def rekeyed(self, sequence: Sequence) -> None:
        """Compare a waiting sequence anew; nothing that another one has left concerns it, and
        what a running one computes concerns nobody."""
        self.stops(sequence)
        self.release(sequence)
        history = self._histories.get(sequence.number)
        if history is not None:
            self._expect(history, None)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self.waits(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop a finished sequence."""
        self.stops(sequence)
        self._stop_waiting(sequence)
        join = self._joins.get(sequence.number)
        if join is not None:
            self._take(join)
        history = self._histories.pop(sequence.number, None)
        if history is not None:
            self._expect(history, None)

    # Joining

    def unseen(self) -> list[tuple[Sequence, list[Sequence]]]:
        """Return waiting sequences with the prefills that begin like them and that they have not
        been compared with."""
        fresh, started = self._new_waiting, self._new_prefills
        if not (fresh or started):
            return []
        self._new_waiting, self._new_prefills = {}, []
        candidates: dict[int, tuple[Sequence, list[Sequence]]] = {}
        for sequence in fresh.values():
            prefills = self._prefills.like(sequence)
            if prefills and self._may_join(sequence):
                candidates[sequence.number] = sequence, prefills
        for leader in started:
            for sequence in self._waiting.like(leader) if leader in self._prefills else ():
                if sequence.number not in fresh and self._may_join(sequence):
                    candidates.setdefault(sequence.number, (sequence, []))[1].append(leader)
        return list(candidates.values())

    def may_follow(self, sequence: Sequence, leader: Sequence) -> bool:
        """Return True unless the sequence has joined this leader before."""
        history = self._histories.get(sequence.number)
        return history is None or leader.number not in history.leaders

    def add(self, follower: Sequence, leader: Sequence, cut: int, boundary: int) -> None:
        """Let a waiting sequence wait for a leader that will come past a cut.

        Args:
            boundary: depth of the follower's match.
        """
        assert follower.lease is None and leader.lease is not None
        assert follower.number not in self._joins and cut > max(leader.num_computed, boundary)
        join = Join(follower, leader, cut, boundary, self._clock())
        history = self._histories.setdefault(follower.number, _History())
        last, history.last = history.last, join
        if last is not None and boundary <= last.boundary:
            history.fruitless += 1
        self._expect(history, None)
        if history.waited.boundary is None:
            history.waited.boundary = boundary
        lead = self._leads.get(leader.number)
        if lead is None:
            lead = self._leads[leader.number] = _Lead(leader, leader.num_computed)
        self._joins[follower.number] = lead.joins[follower.number] = join
        self._followers.add(follower.number)
        if self._cache.config.has_state:
            self._want_snapshot(lead, cut)
        self._note_followers(lead)

    def release(self, follower: Sequence) -> None:
        """End a follower's wait for now; it may join the same leader again."""
        join = self._joins.get(follower.number)
        if join is not None:
            self._take(join)
            self._histories[follower.number].last = None
        if follower in self._waiting:
            self._new_waiting[follower.number] = follower

    def settle(self) -> None:
        """End the waits that are over after a successful step."""
        for lead in list(self._leads.values()):
            leader = lead.leader
            lead.idle = 0 if leader.num_computed > lead.computed else lead.idle + 1
            lead.computed = leader.num_computed
            for join in list(lead.joins.values()):
                past = leader.num_computed >= join.cut
                if past or not leader.prefilling or lead.idle >= MAX_IDLE_STEPS:
                    self._end(join)
        for leader in [prefill for prefill in self._prefills.all if not prefill.prefilling]:
            self._prefills.remove(leader)

    def take_waited(self, sequence: Sequence) -> Waited:
        """Return what joining has brought a sequence that is being admitted."""
        history = self._histories.get(sequence.number)
        if history is None:
            return Waited()
        waited, history.waited = history.waited, Waited()
        return waited

    # Helpers

    def _stop_waiting(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._new_waiting.pop(sequence.number, None)

    def _may_join(self, sequence: Sequence) -> bool:
        """Return True if a waiting sequence may join. A suspended one resumes instead, and one that
        was in a failed step runs alone."""
        if sequence.number in self._joins or sequence.lease is not None:
            return False
        if sequence.suspended is not None or sequence.suspect_until or sequence.request.cold:
            return False
        history = self._histories.get(sequence.number)
        return history is None or history.fruitless < MAX_FRUITLESS_JOINS

    def _end(self, join: Join) -> None:
        """End a wait: the leader came past the cut, or never will."""
        self._take(join)
        follower, history = join.follower, self._histories[join.follower.number]
        history.leaders.add(join.leader.number)
        self._new_waiting[follower.number] = follower
        if join.leader.num_computed >= join.cut:
            self._expect(history, self._cache.node_at(follower.keys, join.cut))

    def _take(self, join: Join) -> None:
        """Remove a join; the leader keeps neither the follower's priority nor its cut."""
        history = self._histories[join.follower.number]
        history.waited.seconds += self._clock() - join.since
        del self._joins[join.follower.number]
        self._followers.discard(join.follower.number)
        lead = self._leads[join.leader.number]
        del lead.joins[join.follower.number]
        if all(join.cut != other.cut for other in lead.joins.values()):
            if join.cut in lead.added and join.cut > join.leader.num_computed:
                join.leader.snapshot_positions.pop(join.cut, None)
            lead.added.discard(join.cut)
        self._note_followers(lead)
        if not lead.joins:
            del self._leads[join.leader.number]

    @staticmethod
    def _want_snapshot(lead: _Lead, cut: int) -> None:
        """Put a meeting cut before the leader's other positions, outside of their limit."""
        positions = lead.leader.snapshot_positions
        if cut not in positions:
            lead.added.add(cut)
        kind = positions.pop(cut, "junction")
        lead.leader.snapshot_positions = {cut: kind, **positions}

    @staticmethod
    def _note_followers(lead: _Lead) -> None:
        """Tell a leader who waits for it; it has the best priority of all."""
        leader = lead.leader
        leader.followers = tuple(join.follower for join in lead.joins.values())
        requests = [sequence.request for sequence in (leader, *leader.followers)]
        leader.priority = min(request.priority for request in requests)

    def _expect(self, history: _History, node: Node | None) -> None:
        """Count the coming use of a node in the value of its entries, instead of the last one's."""
        if history.expected is not None:
            self._cache.expect(history.expected, -1)
        history.expected = node
        if node is not None:
            self._cache.expect(node, 1)


class Joining:
    """Compares waiting sequences with running prefills, each pair once.

    A sequence joins the prefill that takes its match deepest, if that gains at least
    `min_snapshot_gain` blocks. One block is enough behind a medium's end, where a snapshot stands
    whatever it saves, if the prefill has come as far as the match: it is there no later than the
    sequence would be. Lower cache tiers are asked at the same time, for more than that.

    Args:
        queues: provides the sequences.
        admitter: matches sequences with the cache.

    Attributes:
        joins: who waits for whom.
    """

    def __init__(self, queues: SequenceQueues, admitter: Admitter) -> None:
        config = queues.cache.config
        self.joins = Joins(queues.cache, queues.followers)
        self.on_waiting = self.joins.waits
        self.on_admitted = self.joins.starts
        self.on_stopping = self.joins.stops
        self.on_ended = self.joins.forget
        self.on_fetched = self.joins.release
        self._queues = queues
        self._admitter = admitter
        self._may_follow = queues.hooks.may_follow
        self._gain = config.min_snapshot_gain * config.block_size
        self._least_gain = config.block_size

    def on_rekeyed(self, group: SequenceGroup) -> None:
        """Compare a request's sequences anew."""
        for sequence in group.sequences:
            self.joins.rekeyed(sequence)

    def on_matched(self, admission: Admission) -> None:
        """Report what waiting for a leader has brought."""
        waited = self.joins.take_waited(admission.sequence)
        admission.joined_tokens, admission.joined_ms = waited.report(admission.boundary)

    def on_committed(self, rows: list[CommittedRow], output: StepOutput) -> None:
        """End the waits that are over."""
        self.joins.settle()

    def plan_prompts(self) -> None:
        """Let every waiting sequence join if it gains by it. Call it whenever sequences may have
        begun to wait or to run; it costs nothing otherwise."""
        if self.joins and self._queues.media.loading:
            self._release_stalled()
        for sequence, prefills in self.joins.unseen():
            self._join(sequence, prefills)

    def _release_stalled(self) -> None:
        """Release followers whose leader waits for pixels before the meeting cut, unless they would
        wait for such pixels themselves."""
        media = self._queues.media
        for join in self.joins.all:
            stall = media.stall(join.leader)
            if stall < join.cut and media.stall(join.follower, join.boundary) > stall:
                self.joins.release(join.follower)

    def _join(self, sequence: Sequence, prefills: list[Sequence]) -> None:
        limit = self._admitter.prefill_end(sequence) - 1
        near = [
            prefill
            for prefill in prefills
            if self.joins.may_follow(sequence, prefill) and self._cut(sequence, prefill, 0, limit)
        ]
        if not near:
            return
        match = self._admitter.match(sequence)
        best: tuple[int, int] = (0, 0)
        leader: Sequence | None = None
        for prefill in near:
            if not all(may(sequence, prefill, match) for may in self._may_follow):
                continue
            reach = self._reach(sequence, prefill, match)
            cut = self._cut(sequence, prefill, match.boundary, reach)
            if cut and (cut, prefill.num_computed) > best:
                best, leader = (cut, prefill.num_computed), prefill
        if leader is None or not self._promise(leader, best[0]):
            return
        self.joins.add(sequence, leader, best[0], match.boundary)
        self._admitter.may_use(sequence, match, least=best[0] + 1)

    def _cut(self, sequence: Sequence, leader: Sequence, boundary: int, limit: int) -> int:
        """Return the deepest cut up to `limit` that a leader will come past; 0 if it gains too
        little."""
        limit = min(limit, leader.prefill_target)
        sequence.keys.bring_from(leader.keys)
        keys, least = sequence.keys, max(boundary + self._gain, leader.num_computed + 1)
        cut = shared_cut(keys, leader.keys, least=least, limit=limit)
        if cut or leader.num_computed < boundary or limit <= boundary + self._least_gain:
            return cut
        least = max(boundary + self._least_gain, leader.num_computed + 1)
        if not keys.span_ends_within(boundary, min(limit, boundary + self._gain)):
            return 0
        near = shared_cut(keys, leader.keys, least=least, limit=limit)
        return near if keys.span_ends_within(boundary, near) else 0

    def _reach(self, sequence: Sequence, leader: Sequence, match: Match) -> int:
        """Return the deepest position that a leader can take a sequence's match to now."""
        media = self._queues.media
        if not media.loading:
            return match.limit
        stall = media.stall(leader)
        if media.stall(sequence, match.boundary) <= stall:
            return match.limit
        return min(match.limit, stall)

    def _promise(self, leader: Sequence, cut: int) -> bool:
        """Add a meeting cut to the planned slice that passes it. Return False if no row is free for
        the state there: what the leader computes would not help then."""
        queues = self._queues
        if not queues.cache.config.has_state:
            return True
        for place, item in enumerate(queues.planned):
            if item.sequence == leader.number and item.start < cut <= item.end:
                added = self._with_snapshot(leader, item, cut)
                if added is None:
                    return False
                queues.planned[place] = added
        return True

    def _with_snapshot(self, leader: Sequence, item: Slice, cut: int) -> Slice | None:
        if any(position == cut for position, _ in item.snapshots):
            return item
        assert leader.lease is not None
        kind = leader.snapshot_positions.get(cut, "junction")
        row = self._queues.cache.reserve_snapshot(leader.lease, cut, kind)
        if row is None:
            return None
        return replace(item, snapshots=tuple(sorted((*item.snapshots, (cut, row)))))
