"""Fair shares of the model: weighted fair queueing of tenants by the tokens computed for them.

Each tenant has a virtual time: the tokens computed for it over its weight. Whose is least has the
next turn, for a seat and for the prompt tokens of a step. Seats count as tokens in advance: so
tenants of equal times get equally many seats, and those that have none take turns with the others.
A tenant alone has no rivals: nothing is counted then.

docs/architecture.md#shares
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from vlm_serve.engine.core.queues import SequenceQueues, order
from vlm_serve.engine.features.usage import UsageByName
from vlm_serve.engine.requests.plan import StepOutput, StepPlan
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup
from vlm_serve.engine.requests.tenant import BACKGROUND, Tenant

SEAT_TOKENS = 64
"""Tokens that a seat counts as while it is held."""
LEAST_TURN = 16
"""Tokens that a tenant's only seat counts as: the length of a turn where tenants are more than
seats. Also the new tokens that a sequence computes at least before it gives up its seat again."""
MAX_CREDIT = 64 * SEAT_TOKENS
"""Tokens by which a tenant may be behind the others at most, however long it could not start."""
MAX_DEBTS = 1000
"""Idle tenants at most whose time is ahead of the others' and so is kept."""

_Key = tuple[str, bool]
_Turn = tuple[bool, float]
"""Whether it is work in the background, and a virtual time; lower ones come first."""


@dataclass(slots=True, eq=False)
class _Account:
    """A tenant with open requests; its work in the background has an account of its own.

    Attributes:
        used: virtual time in tokens.
        open: number of its unfinished sequences.
        waiting: those without a lease, in their order.
        seats: number of those that run, as of the plan in progress.
    """

    tenant: Tenant
    background: bool
    used: float
    open: int = 0
    waiting: list[Sequence] = field(default_factory=list)
    seats: int = 0

    def turn(self, change: int = 0) -> _Turn:
        """Return its place in the order of turns if it had `change` more seats."""
        seats = self.seats + change
        ahead = LEAST_TURN + SEAT_TOKENS * (seats - 1) if seats > 0 else 0
        return self.background, self.used + ahead / self.tenant.weight


class Shares:
    """Decides whose turn it is, and who gives up a seat for whom.

    Args:
        queues: waiting and running sequences.

    Attributes:
        usage: tokens of ended requests by label.
        given_up: seats given up by label.
    """

    def __init__(self, queues: SequenceQueues) -> None:
        self.usage = UsageByName("other tenants")
        self.given_up: Counter[str] = Counter()
        self._queues = queues
        self._accounts: dict[_Key, _Account] = {}
        self._of: dict[int, _Account] = {}
        self._debts: dict[_Key, float] = {}
        self._time = {False: 0.0, True: 0.0}
        self._marks: dict[int, int] = {}

    @property
    def _alone(self) -> bool:
        return len(self._accounts) < 2

    # Requests come and go

    def on_added(self, group: SequenceGroup) -> None:
        """Open an account. It begins at the time of the others: who was idle has no credit."""
        request = group.request
        key = request.tenant.name, request.priority >= BACKGROUND
        account = self._accounts.get(key)
        if account is None:
            used = max(self._debts.pop(key, 0.0), self._now(background=key[1]))
            account = self._accounts[key] = _Account(request.tenant, key[1], used)
        account.tenant = request.tenant
        account.open += len(group.sequences)
        for sequence in group.sequences:
            self._of[sequence.number] = account

    def on_ended(self, sequence: Sequence) -> None:
        """Close an account with its last sequence. A time ahead of the others' is kept."""
        self._marks.pop(sequence.number, None)
        account = self._of.pop(sequence.number)
        account.open -= 1
        self._stop_waiting(account, sequence)
        if account.open:
            return
        key = account.tenant.name, account.background
        del self._accounts[key]
        if any(each.background is account.background for each in self._accounts.values()):
            now = self._now(background=account.background)
            if len(self._debts) < MAX_DEBTS:
                self._debts[key] = account.used
        else:
            now = math.inf  # nobody is left to whom a time ahead would matter
            self._time[account.background] = account.used
        for other in [other for other, used in self._debts.items() if used <= now]:
            if other[1] is account.background:
                del self._debts[other]

    def on_finished(self, group: SequenceGroup) -> None:
        """Count an ended request."""
        if not group.request.cold:
            self.usage.add(group.request.tenant.label, group.usage)

    def on_waiting(self, sequence: Sequence) -> None:
        """Put a sequence into its tenant's queue."""
        insort(self._of[sequence.number].waiting, sequence, key=order)

    def _now(self, *, background: bool) -> float:
        """Return the least time of open accounts, or the last one if there are none."""
        used = [each.used for each in self._accounts.values() if each.background is background]
        return min(used, default=self._time[background])

    @staticmethod
    def _stop_waiting(account: _Account, sequence: Sequence) -> None:
        if sequence in account.waiting:
            account.waiting.remove(sequence)

    def _payers(self, sequence: Sequence) -> list[_Account]:
        """Return the accounts of a sequence and of those that wait for what it computes."""
        return [self._of[each.number] for each in (sequence, *sequence.followers)]

    def _first(self, sequence: Sequence) -> _Account:
        """Return the account of a sequence, or of the follower whose turn comes before."""
        if not sequence.followers:
            return self._of[sequence.number]
        return min(self._payers(sequence), key=_Account.turn)

    # Steps

    def plan_open(self, room: int) -> int:
        """Count seats, and bring tenants that lack nothing to the time of those that wait: nobody
        saves up what it did not ask for. Take no token."""
        if self._alone:
            return 0
        accounts, is_held = self._accounts.values(), self._queues.is_held
        lacking = {each for each in accounts if not all(map(is_held, each.waiting))}
        for account in accounts:
            account.seats = 0
        for sequence in self._queues.running:
            account = self._of[sequence.number]
            account.seats += 1
            if sequence.prefilling:
                lacking.add(account)
        for background in (False, True):
            alike = [each for each in accounts if each.background is background]
            latest = max((each.used for each in alike), default=0.0)
            now = min((each.used for each in alike if each in lacking), default=latest)
            for account in alike:
                least = latest - MAX_CREDIT if account in lacking else now
                account.used = max(account.used, least)
        return 0

    def on_learned(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Charge the tokens of a step; those of a leader in equal parts to it and its followers."""
        if self._alone:
            return
        for number, count in plan.tokens_by_sequence():
            if number in self._of:  # else it is the last token of an answer that has ended
                payers = self._payers(self._queues[number])
                part = count / len(payers)
                for account in payers:
                    account.used += part / account.tenant.weight

    def may_extend(self, blocks: int, rows: int) -> str:
        """Return "shares" if somebody may have to give up a seat."""
        return "" if self._alone or not self._queues.waiting else "shares"

    def take_turns(self, running: Rows[Sequence], waiting: Rows[Sequence]) -> Iterable[Sequence]:
        """Return running sequences, and waiting ones if any are given, in the order of their
        tenants' turns; each tenant's keep theirs."""
        return (*running, *waiting) if self._alone else self._in_turn(running, bool(waiting))

    def _in_turn(self, running: Rows[Sequence], waiting: bool) -> Iterator[Sequence]:
        queues: dict[_Account, list[Sequence]] = {}
        for sequence in running:
            queues.setdefault(self._first(sequence), []).append(sequence)
        for account in self._accounts.values() if waiting else ():
            if account.waiting:
                queues.setdefault(account, []).extend(account.waiting)
        turns = [
            (*account.turn(), number, account, iter(queue))
            for number, (account, queue) in enumerate(queues.items())
        ]
        heapq.heapify(turns)
        while turns:
            background, time, number, account, queue = turns[0]
            following = next(queue, None)
            if following is None:
                heapq.heappop(turns)
                continue
            yield following
            if not self._queues.is_held(following):
                work = max(SEAT_TOKENS, following.prefill_target - following.num_computed)
                time += work / account.tenant.weight
                heapq.heapreplace(turns, (background, time, number, account, queue))

    def may_overtake(self, sequence: Sequence, prefill: Sequence) -> bool:
        """Return True if a short prompt and the long one that it would overtake have one tenant:
        the turns decide about others."""
        return self._alone or self._of[sequence.number] is self._of[prefill.number]

    # Seats

    def give_seat(self, sequence: Sequence) -> bool:
        """Have a running sequence give up its seat if its tenant would not be behind the waiting
        one's by that. Return False if none does."""
        if self._alone:
            return False
        account = self._of[sequence.number]
        victim = self._ahead_of(account, account.turn(+1), self._queues.running)
        if victim is None:
            return False
        self.given_up[self.usage.bounded(victim.request.tenant.label)] += 1
        self._queues.preempt(victim)
        return True

    def plan_victim(self, running: Rows[Sequence]) -> Sequence | None:
        """Return the running sequence to give up its blocks; None: the last one of all.

        That is the last one, too, if no other tenant is ahead by more than one seat, and of those
        who have lost work before: two that do not fit beside each other would else compute the same
        again and again.
        """
        if self._alone:
            return None
        account = self._first(max(running, key=order))
        return self._ahead_of(account, account.turn(), running)

    def _ahead_of(self, account: _Account, due: _Turn, running: Rows[Sequence]) -> Sequence | None:
        """Return a sequence of the tenant that is furthest ahead, of those that would not come
        before `due` with a seat less. Of one tenant prompts are spared, and then what came
        first."""
        best: tuple[_Turn, bool, tuple[int, int, int]] | None = None
        found = None
        for other in running:
            payer = self._first(other)
            turn = payer.turn(-1)
            if payer is account or turn < due or not self._may_yield(other):
                continue
            rank = turn, not other.prefilling, order(other)
            if best is None or rank > best:
                best, found = rank, other
        return found

    def _may_yield(self, sequence: Sequence) -> bool:
        """Return True if a running sequence has computed enough since it last gave up its seat, and
        its row is its own."""
        mark = self._marks.get(sequence.number)
        if mark is not None and sequence.num_computed < mark + LEAST_TURN:
            return False
        return not (sequence.suspect_until or self._queues.is_copied(sequence))

    def on_stopping(self, sequence: Sequence) -> None:
        """Note how far a sequence has come that is about to lose its lease."""
        account = self._of[sequence.number]
        account.seats -= 1
        if not self._alone:
            before = self._marks.get(sequence.number, 0)
            self._marks[sequence.number] = max(before, sequence.num_computed)

    def on_admitted(self, sequence: Sequence) -> None:
        """Count a seat. What is computed again of a sequence is no progress."""
        account = self._of[sequence.number]
        account.seats += 1
        self._stop_waiting(account, sequence)
        mark = self._marks.get(sequence.number)
        if mark is not None:
            self._marks[sequence.number] = mark + max(0, mark - sequence.num_computed)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the counters by label."""
        return {
            label: {**counts, "given_up_seats": self.given_up[label]}
            for label, counts in self.usage.as_dict().items()
        }
