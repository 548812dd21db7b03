"""Ends of answers: a sequence whose answer has ended keeps its lease until its state is a snapshot.

At the end of an answer the last token is sampled and not computed: the state lies before the
end-of-turn token, and the cut point behind it. So an *ending* sequence computes one more row, of
lowest priority. It holds no seat and no live row, preempts nobody, and is dropped as soon as
anybody needs what it holds. Whether an end is worth that is learned: from how often the ends of
earlier answers were where a next turn started.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from vlm_serve.cache.matching import key_at
from vlm_serve.cache.records import Lease, Snapshot
from vlm_serve.engine.core.hooks import Holding, Loop
from vlm_serve.engine.core.queues import SequenceQueues
from vlm_serve.engine.features.endings.next_turns import NextTurns
from vlm_serve.engine.requests.plan import PartialFold, Slice, StepPlan
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup
from vlm_serve.preprocess.identity.keys import PromptKeys

_REMEMBERED = 1024
"""Ends of answers that may still be continued. An end that leaves the memory never was."""
_GROUPS = 256
_DECAY = 0.98
"""Weight of all earlier ends of a group after each further one."""
_PRIOR = 4.0
"""Ends, all of them continued, that a new group begins with."""

Group = tuple[bytes, str]
"""Root key of the prompts (a tenant of one model), and kind of requests."""
EndingMode = Literal["auto", "always", "off"]

LEAST_TOKENS = 8
"""Tokens of an answer, times the share of such answers that go on, from which its state pays. A row
of its own costs about as much as so many tokens of a prompt."""
_NEXT_PROMPTS = 16
"""Waiting prompts compared with ends of answers: those that may be admitted next."""
_TOKENS = "tokens"
"""Kind of requests without a conversation."""

Ask = Callable[[Sequence, Callable[[int], None]], None]
"""Finds out how many tokens of prompt and answer the next turn shares, and reports them later, on
the engine's thread."""


@dataclass(slots=True)
class _Counts:
    ends: float = _PRIOR
    continued: float = _PRIOR

    def add(self, *, continued: bool) -> None:
        self.ends = _DECAY * self.ends + 1
        self.continued = _DECAY * self.continued + continued


class EndReuse:
    """Remembers ends of answers by their keys, and counts which of them a prompt contains later.

    Snapshots play no part in that: an end without one counts as well, so a group that has stopped
    to come back can start again. Both memories are bounded.
    """

    def __init__(self) -> None:
        self._ends: OrderedDict[bytes, Group] = OrderedDict()
        self._groups: OrderedDict[Group, _Counts] = OrderedDict()

    def rate(self, group: Group) -> float:
        """Return the share of the group's ends that a next turn continues, from 0 to 1."""
        counts = self._groups.get(group)
        return 1.0 if counts is None else counts.continued / counts.ends

    def ended(self, group: Group, key: bytes) -> None:
        """Remember the end of an answer by the key of its prefix."""
        self._ends[key] = group
        self._ends.move_to_end(key)
        while len(self._ends) > _REMEMBERED:
            self._count(self._ends.popitem(last=False)[1], continued=False)

    def forget(self, key: bytes) -> None:
        """Forget an end that the next turn cannot share, whatever its traffic."""
        self._ends.pop(key, None)

    def asked(self, keys: PromptKeys) -> None:
        """Count the deepest remembered end that a new prompt continues."""
        known = self._ends.__contains__
        # A prompt of a long conversation has thousands of blocks: no statement runs for each.
        key = next(filter(known, reversed(keys.block_keys)), None)
        tail = next(((cut, key) for cut, key in reversed(keys.tails.items()) if known(key)), None)
        if tail is not None:
            depth = 0 if key is None else keys.block_keys.index(key) + 1
            key = tail[1] if tail[0] > depth * keys.block_size else key
        if key is not None:
            self._count(self._ends.pop(key), continued=True)

    def _count(self, group: Group, *, continued: bool) -> None:
        self._groups.setdefault(group, _Counts()).add(continued=continued)
        self._groups.move_to_end(group)
        if len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)


@dataclass(eq=False, slots=True)
class Ending:
    """A sequence whose answer has ended.

    Attributes:
        cut: where the state of its row will be: behind its last token, or where it is. 0: it has no
            row, only the one of the last block boundary.
        key: of the prefix that its state is expected to stand for.
        shared: tokens that the next turn shares; None while unknown.
        snapshot: what the row of the last token becomes, once that is planned.
        ahead: that row is being computed, by a step that was planned before the answer had ended.
        passed: it has been computed so.
    """

    sequence: Sequence
    cut: int
    key: bytes
    shared: int | None = None
    snapshot: Snapshot | None = None
    ahead: bool = False
    passed: bool = False

    @property
    def lease(self) -> Lease:
        assert self.sequence.lease is not None
        return self.sequence.lease

    @property
    def computes(self) -> bool:
        """True if the row of the last token is missing."""
        return self.cut > self.lease.length and not self.passed


class Endings:
    """Keeps, plans and publishes the states at the ends of answers.

    Args:
        queues: sequences and their resources.
        mode: "auto" keeps a state if it is expected to pay, "always" regardless of that.
        most: maximum number of sequences that are ending.

    Attributes:
        ask: finds out what the next turn shares. Without it, that is everything.
        reuse: how often ends of answers are continued.
        num_dropped: number of sequences dropped before their state was a snapshot.
    """

    def __init__(self, queues: SequenceQueues, mode: EndingMode, most: int) -> None:
        self.ask: Ask | None = None
        self.reuse = EndReuse()
        self.num_dropped = 0
        self._queues = queues
        self._mode = mode
        self._most = most
        self._endings: dict[int, Ending] = {}
        self._due: list[Ending] = []
        self._planned: list[Ending] = []
        self._next_turns: NextTurns | None = None

    def has_work(self) -> bool:
        """Return True if a step of its own would get on with one of them."""
        return any(ending.shared is not None for ending in self._endings.values())

    def attach(self, loop: Loop) -> None:
        """Ask what next turns share from now on, on a thread of its own."""
        self._next_turns = NextTurns(loop.post)
        self.ask = self._next_turns.ask

    def close(self) -> None:
        """End that thread."""
        if self._next_turns is not None:
            self._next_turns.close()

    # Answers

    def on_added(self, group: SequenceGroup) -> None:
        """Learn from a new request."""
        if self._mode == "auto" and not group.request.cold:
            self.reuse.asked(group.sequences[0].keys)

    def may_leave(self, sequence: Sequence) -> bool:
        """Keep a sequence whose answer has ended, if a state of it may be worth that. If not,
        return True, without any change."""
        expected = self._expected(sequence)
        cut = self._find_cut(sequence)
        last = cut or self._trailing(sequence)
        if expected is None or last is None:
            return True
        key = key_at(sequence.keys, last)
        if self._mode == "auto":
            self.reuse.ended(_group(sequence), key)
            if not self._pays(sequence, expected):
                return True
        queues, ends = self._queues, self._queues.cache.answer_ends
        queues.keep(sequence)
        ending = Ending(sequence, cut, key, ahead=sequence.number in queues.ahead)
        if cut:
            ends.keep_row(ending.lease, cut, expected)
        else:
            queues.forget_updates(sequence)
            ends.release_row(ending.lease)
        self._endings[sequence.number] = ending
        if len(self._endings) > self._most:
            self._drop(next(iter(self._endings.values())))
        if self.ask is None or sequence.request.next_turn is None:
            self._resolve(ending, sequence.num_tokens)
        else:
            self.ask(sequence, lambda shared: self._resolve(ending, shared))
        return False

    def plan_trail(self) -> None:
        """Put the states of planned sequences at block boundaries into their second rows. A decode
        token that completes a block leaves its state there. Where verified drafts have passed a
        boundary, some of the pending updates make it from a copy of the row."""
        queues, copies = self._queues, list[PartialFold]()
        size = queues.cache.config.block_size
        for place, item in enumerate(queues.planned):
            sequence = queues[item.sequence]
            completes = item.kind == "decode" and not item.snapshots and not item.end % size
            position = item.end if completes else item.start // size * size
            updates = position - (item.start - sequence.pending)
            if not completes and (item.kind == "prefill" or updates <= 0):
                continue
            row, lease = self.plan_boundary(sequence, position), sequence.lease
            if row is None:
                continue
            if completes:
                queues.planned[place] = replace(item, snapshots=((position, row),))
            else:
                assert lease is not None
                first = queues.first_update(sequence)
                copies.append(PartialFold(lease.src_row, row, first, updates))
        queues.partial_folds = tuple(copies)

    def plan_boundary(self, sequence: Sequence, position: int) -> int | None:
        """Return the second row of a sequence for its state at a block boundary, if that may pay;
        else None."""
        expected = self._expected(sequence)
        if expected is None or not self._pays(sequence, expected):
            return None
        assert (lease := sequence.lease) is not None
        return self._queues.cache.answer_ends.trail(lease, position, expected)

    def may_extend(self, blocks: int, rows: int) -> str:
        """Return "ending" if a last token is to be computed."""
        due = (each.shared is not None and not each.ahead for each in self._endings.values())
        return "ending" if any(due) else ""

    def on_passed(self, sequence: Sequence, end: int) -> None:
        """Publish the state behind a last token, or keep it until it is known who shares it."""
        ending = self._endings[sequence.number]
        ending.ahead, ending.passed = False, end == ending.cut
        if ending.passed and ending.shared is not None:
            self._publish_passed(ending)

    def on_failed(self, plan: StepPlan) -> None:
        """Drop all of them, and free second rows that a failed step may have written: what they
        hold is unknown."""
        self.reclaim("memory")
        written = {fold.destination for fold in plan.partial_folds}
        for sequence in self._queues.running if written else ():
            lease = sequence.lease
            if lease is not None and lease.trailing and lease.trailing.row in written:
                self._queues.cache.answer_ends.drop_trailing(lease)

    # Steps

    def plan_open(self, room: int) -> int:
        """Choose what the next step computes or folds, at most `room` tokens, and get the blocks
        for it. Return the number of tokens.

        A waiting prompt that contains an answer's end proves that the next turn shares it.
        """
        self._due = []
        if self._queues.suspects:
            return 0
        unknown = [e for e in self._endings.values() if e.shared is None and e.cut]
        if unknown:
            waiting = self._queues.waiting[:_NEXT_PROMPTS]
            prompts = [sequence.keys for sequence in waiting]
            for ending in unknown:
                if any(_contains(keys, ending) for keys in prompts):
                    ending.shared = ending.sequence.num_tokens
        left = room
        for ending in [e for e in self._endings.values() if e.shared is not None]:
            if ending.passed:
                self._publish_passed(ending)
                continue
            if ending.computes and left <= 0:
                continue
            left -= ending.computes
            if self._fits(ending):
                self._due.append(ending)
            else:
                self._drop(ending)
        return sum(ending.computes for ending in self._due)

    def may_start(self, sequence: Sequence) -> bool:
        """Return False if this step makes a state that a waiting sequence can start from."""
        cold = sequence.request.cold
        return cold or not any(_contains(sequence.keys, ending) for ending in self._due)

    def plan_close(self) -> bool:
        """Add the chosen endings to the step; return True if there are some."""
        queues = self._queues
        for ending in self._due:
            sequence = ending.sequence
            queues.fold(sequence)
            if ending.computes:
                ending.snapshot = ending.lease.reserved[ending.cut]
                queues.planned.append(_last_token(sequence, ending.lease))
        self._planned, self._due = self._due, []
        return bool(self._planned)

    def on_computed(self) -> None:
        """Publish the states behind the last tokens of answers, and those that were only folded."""
        planned, self._planned = self._planned, []
        for ending in planned:
            if ending.snapshot is None:
                self._publish_trailing(ending)
            else:
                self._queues.cache.answer_ends.supersede(ending.snapshot)
                self._close(ending)

    def reclaim(self, holding: Holding) -> bool:
        """Drop all of them, or those with an adapter: others wait for its slot. Return False if
        there are none."""
        dropped = [
            ending
            for ending in self._endings.values()
            if holding == "memory" or ending.sequence.adapter_slot >= 0
        ]
        for ending in dropped:
            self._drop(ending)
        return bool(dropped)

    # Decisions

    def _expected(self, sequence: Sequence) -> float | None:
        """Return the expected number of uses of a state in a sequence's answer; None if it cannot
        be kept."""
        cache, lease = self._queues.cache, sequence.lease
        possible = (
            self._mode != "off"
            and cache.config.has_state
            and cache.config.enabled
            and lease is not None
            and lease.committed
            and not lease.private
            and not sequence.prefilling
            and not sequence.suspect_until
            and sequence.num_generated > 1
            and not any(lease.row in copy for copy in self._queues.row_copies)
        )
        if not possible:
            return None
        return 1.0 if self._mode == "always" else self.reuse.rate(_group(sequence))

    def _pays(self, sequence: Sequence, expected: float) -> bool:
        return self._mode == "always" or expected * sequence.num_generated >= LEAST_TOKENS

    def _find_cut(self, sequence: Sequence) -> int:
        """Return where the state of the sequence's row can be a snapshot; 0 for nowhere."""
        answer, cuts, length = sequence.answer, sequence.keys.cuts, sequence.num_computed
        by_token = answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str)
        if by_token and cuts and cuts[-1] == sequence.num_tokens == length + 1:
            return sequence.num_tokens
        if sequence.number in self._queues.ahead:
            return 0
        at_boundary = length % sequence.keys.block_size == 0
        return length if at_boundary and length > len(sequence.prompt) else 0

    def _trailing(self, sequence: Sequence) -> int | None:
        """Return the position of the sequence's second row, if that holds a state."""
        lease = sequence.lease
        if lease is None or lease.trailing is None or lease.trailing.position > lease.length:
            return None
        return lease.trailing.position

    def _resolve(self, ending: Ending, shared: int) -> None:
        """Take the last state shared by the next turn, or none."""
        sequence = ending.sequence
        if self._endings.get(sequence.number) is not ending or ending.shared is not None:
            return
        if ending.cut and ending.cut <= shared:
            ending.shared = shared
            if ending.passed:
                self._publish_passed(ending)
            elif not ending.computes and not sequence.pending:
                self._publish_trailing(ending)
            return
        trailing = self._trailing(sequence)
        before_last = ending.computes or ending.passed
        if trailing is not None and trailing <= shared and (not ending.cut or before_last):
            self._publish_trailing(ending)
            return
        self.reuse.forget(ending.key)
        self._close(ending)

    def _fits(self, ending: Ending) -> bool:
        """Get the block of an ending's last token. No pin gives way to it."""
        cache = self._queues.cache
        missing = -(-ending.cut // cache.config.block_size) - len(ending.lease.blocks)
        return missing <= cache.available_block_count and cache.grow(ending.lease, ending.cut)

    # Ends

    def _publish_passed(self, ending: Ending) -> None:
        sequence, lease = ending.sequence, ending.lease
        snapshot, cache = lease.reserved[ending.cut], self._queues.cache
        cache.commit(
            lease,
            sequence.keys,
            ending.cut,
            exact_until=sequence.prefill_target,
            answer_start=len(sequence.prompt),
        )
        sequence.num_computed = ending.cut
        cache.answer_ends.supersede(snapshot)
        self._close(ending)

    def _publish_trailing(self, ending: Ending) -> None:
        sequence = ending.sequence
        self._queues.cache.answer_ends.publish_trailing(
            ending.lease, sequence.keys, sequence.prefill_target
        )
        self._close(ending)

    def _drop(self, ending: Ending) -> None:
        self.num_dropped += 1
        self._close(ending)

    def _close(self, ending: Ending) -> None:
        del self._endings[ending.sequence.number]
        self._due = [other for other in self._due if other is not ending]
        self._planned = [other for other in self._planned if other is not ending]
        self._queues.remove(ending.sequence)


def _group(sequence: Sequence) -> Group:
    turn = sequence.request.next_turn
    return sequence.prompt.keys.owners.prompt, _TOKENS if turn is None else turn.kind


def _contains(keys: PromptKeys, ending: Ending) -> bool:
    """Return True if a prompt contains all tokens up to an ending's cut."""
    cut = ending.cut
    if not cut or len(keys) <= cut:
        return False
    is_cut = cut % keys.block_size == 0 or cut in keys.tails
    return is_cut and key_at(keys, cut) == ending.key


def _last_token(sequence: Sequence, lease: Lease) -> Slice:
    """Return the slice that computes an answer's last token and samples nothing."""
    start, first_block = sequence.num_computed, sequence.settled_blocks
    return Slice(
        sequence=sequence.number,
        kind="decode",
        token_ids=(sequence.token_ids[start],),
        start=start,
        end=start + 1,
        src_row=lease.src_row,
        dst_row=lease.src_row,
        first_block=first_block,
        blocks=tuple(lease.blocks[first_block:]),
        write_start=lease.shared_tokens,
        adapter=sequence.adapter_slot,
    )
