"""Hooks of the core step: the moments at which features are called.

The core plans, runs and commits. It imports no feature; a feature has methods of these names, and
`Hooks` calls those of all features in the order of the table (`features/table.py`). One that is off
is not in the table, so nothing of it is called.

*Notices* (`on_...`) tell what has happened. *Vetoes* (`may_...`) say whether something may happen
now. *Offers* (`plan_...`) add to the step that is being planned, in the order of these phases:
open, decode, prompts, drafts, trail, (the core folds), close. *Reclaims* give memory back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from vlm_serve.cache.experts import Rows as ExpertRows
from vlm_serve.cache.logprobs import RowPiece, WantedRows
from vlm_serve.cache.matching import Match
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.plan import Slice, StepOutput, StepPlan
from vlm_serve.engine.requests.request import Request
from vlm_serve.engine.requests.sequence import Sequence, SequenceGroup

Holding = Literal["memory", "adapters"]
"""Holdings that a reclaim frees: anything, or slots of adapters alone."""


class Loop(Protocol):
    """Part of the engine's loop that features may use. `post` is thread-safe; everything else
    belongs to the loop's own thread.

    Attributes:
        last_step_time: end of the last step, from which on another one is expected, in monotonic
            seconds.
    """

    last_step_time: float

    @property
    def num_running(self) -> int:
        """Number of running sequences."""

    @property
    def has_idle_callers(self) -> bool:
        """True if a caller's request waits for anything but a running prefill."""

    def post(self, command: Callable[[], None]) -> None:
        """Run a command between two steps. Raise EngineClosedError if the loop has ended."""

    def submit(self, request: Request) -> None:
        """Queue a request that does not come from a caller."""

    def abort(self, request_id: str) -> None:
        """End a request. Ignore unknown ids."""

    @property
    def groups(self) -> list[SequenceGroup]:
        """The requests that have not ended."""


class StepRow(NamedTuple):
    """One slice of a step, and its sequence, which may have ended."""

    sequence: Sequence
    item: Slice


@dataclass(slots=True)
class Needs:
    """Records that a request needs of its prompt beside KV and state. Features ask for them.

    Attributes:
        complete_experts: no token may be reused without recorded experts.
        logprobs: rows that are missing; the first one has to be reused or computed.
        first_row: first token whose log-probability is reported; None if none is.
    """

    complete_experts: bool = False
    logprobs: WantedRows | None = None
    first_row: int | None = None


@dataclass(slots=True)
class TokenRecords:
    """Records that the cache keeps with a slice's tokens, see `PrefixCache.commit`."""

    experts: ExpertRows | None = None
    logprobs: RowPiece | None = None


StepRecords = defaultdict[int, TokenRecords]
"""Records of a step by sequence number."""


class CommittedRow(NamedTuple):
    """One slice of a committed step.

    Attributes:
        sequence: its sequence, which may have ended.
        item: the slice.
        accepted: number of its sampled tokens that have become part of the answer.
    """

    sequence: Sequence
    item: Slice
    accepted: int


@dataclass(slots=True)
class Admission:
    """Report of an admitted request in the making; features add what they know.

    Attributes:
        sequence: the sequence; it has its lease.
        match: what the cache had of its prompt.
        boundary: number of tokens that it reuses, at most those of the match.
        reason: why the match is not deeper, see `cache.matching`.
        fetched: (start, end, tier) of tokens that came from lower tiers.
        joined_tokens, joined_ms: what waiting for another prefill has gained and taken.
        experts_missing: number of reused tokens without recorded experts.
        logprobs_reused: number of rows of log-probabilities from the cache.
        weights: see `CacheReport`.
    """

    sequence: Sequence
    match: Match
    boundary: int
    reason: str
    fetched: tuple[tuple[int, int, str], ...] = ()
    joined_tokens: int = 0
    joined_ms: float = 0.0
    experts_missing: int = 0
    logprobs_reused: int = 0
    weights: str = ""

    @property
    def request(self) -> Request:
        return self.sequence.request

    @property
    def uses_match(self) -> bool:
        """Return False if the sequence starts without its match: that held memory it needs."""
        return self.boundary == self.match.boundary


@dataclass(slots=True)
class Hooks:
    """Methods of features by moment, in the table's order.

    What concerns a whole step is called once a step with all its rows; what concerns a sequence is
    called once for each.

    Attributes:
        on_added: a request has been queued.
        on_rekeyed: a request that has not ended has got other keys. It starts again under them, or
            keeps what was computed of it for itself alone, see `SequenceGroup.holds`.
        on_renewed: the model has other weights.
        on_waiting: a sequence begins to wait for its admission, at first or again.
        on_matching: a sequence is about to be matched, or has to start without a match: ask for
            what it needs.
        on_admitted: a sequence has got a lease, and none of its tokens is planned yet.
        on_matched: the same, with what its request's report will say.
        on_fetched: what a waiting sequence can start from may have grown.
        on_stopping: a running sequence is about to lose its lease and to wait again.
        on_ended: an answer has ended. What its sequence holds may be kept for a while.
        on_learned: a step has succeeded and took so many seconds.
        on_output: a step has been computed, and nothing of it is committed yet: add what the cache
            is to keep with the tokens.
        on_computed: the tokens of ended answers have been committed, and no others yet.
        on_passed: the row of an ended answer's last token has been computed ahead, up to a
            position.
        on_committed: a step has been committed.
        on_forked: a choice is about to get its first token; so far it has its parent's.
        on_failed: a step has failed, and nothing has been rolled back yet.
        may_step: may any step begin now?
        may_restart: may a sequence lose what was computed of it, because the weights change?
        may_start: may a waiting sequence be admitted now? One that raises ends its request.
        may_use: may a sequence start from this match, or is a deeper one than `least` coming?
        may_follow: may a sequence wait for what another one's prefill leaves, given its own match?
        may_overtake: may a short prompt come before this prefill, which takes several steps?
        may_prefill: how many of so many tokens may the next slice of a prompt have?
        may_extend: why may the next step not just extend the last one, which takes so many blocks
            and rows? Return "" if it may.
        may_leave: may a sequence whose answer has ended give up what it holds?
        plan_open: takes tokens of the step before all others do, at most as many as are given.
            Return their number.
        take_turns: returns the running sequences, and the waiting ones if any are given, in the
            order in which they may have what is left of the step.
        give_seat: has a running sequence give up its seat for a waiting one. Return False if none
            does.
        plan_victim: returns the running sequence whose blocks are taken for others; None: any.
        plan_decode: extends the decode token of a sequence whose next tokens are known, by at most
            as many tokens as are given.
        plan_prefill: adds to a slice of a prompt that has been planned.
        plan_prompts: looks at the sequences that wait or run; called whenever some may have begun
            to, before prompts are planned and in between.
        plan_drafts: adds drafts, at most as many tokens as are given.
        plan_trail: adds copies of state rows, before pending updates are folded into these.
        plan_boundary: a token of a step that only extends another one completes a block at a
            position: return a row for the state there; None: none.
        plan_close: adds what has the lowest priority. Return True if that is worth a step without
            any slice.
        reclaim: gives up what is held for later. Return False if there was nothing.
        has_work: would a step get on with anything, if no sequence runs or waits?
        attach: the engine's loop begins; it runs functions between steps.
        on_planned: a step has been planned, or could not be: begin what was asked for meanwhile.
        is_busy: will another thread have the loop plan again?
        on_answering: the first token of a request has been sampled.
        report_first, report_last: add to a choice's first and last delta.
        on_finished: all choices of a request have ended.
        on_published: the cache has changed, or may have; called before clients learn of it.
        on_idle: a step or command is over and the next has not begun.
        on_time: something may be due; called between steps and commands.
        seconds_left: how long may the loop wait for a command until something is due?
        close: the engine ends.
    """

    on_added: list[Callable[[SequenceGroup], None]] = field(default_factory=list)
    on_rekeyed: list[Callable[[SequenceGroup], None]] = field(default_factory=list)
    on_renewed: list[Callable[[], None]] = field(default_factory=list)
    on_waiting: list[Callable[[Sequence], None]] = field(default_factory=list)
    on_matching: list[Callable[[Sequence, Needs], None]] = field(default_factory=list)
    on_admitted: list[Callable[[Sequence], None]] = field(default_factory=list)
    on_matched: list[Callable[[Admission], None]] = field(default_factory=list)
    on_fetched: list[Callable[[Sequence], None]] = field(default_factory=list)
    on_stopping: list[Callable[[Sequence], None]] = field(default_factory=list)
    on_ended: list[Callable[[Sequence], None]] = field(default_factory=list)
    on_learned: list[Callable[[StepPlan, StepOutput, float], None]] = field(default_factory=list)
    on_output: list[Callable[[Rows[StepRow], StepOutput, StepRecords], None]] = field(
        default_factory=list
    )
    on_passed: list[Callable[[Sequence, int], None]] = field(default_factory=list)
    on_computed: list[Callable[[], None]] = field(default_factory=list)
    on_committed: list[Callable[[list[CommittedRow], StepOutput], None]] = field(
        default_factory=list
    )
    on_forked: list[Callable[[Sequence, Sequence], None]] = field(default_factory=list)
    on_failed: list[Callable[[StepPlan], None]] = field(default_factory=list)
    may_step: list[Callable[[], bool]] = field(default_factory=list)
    may_restart: list[Callable[[Sequence], bool]] = field(default_factory=list)
    may_start: list[Callable[[Sequence], bool]] = field(default_factory=list)
    may_use: list[Callable[[Sequence, Match, int], bool]] = field(default_factory=list)
    may_follow: list[Callable[[Sequence, Sequence, Match], bool]] = field(default_factory=list)
    may_overtake: list[Callable[[Sequence, Sequence], bool]] = field(default_factory=list)
    may_prefill: list[Callable[[Sequence, int], int]] = field(default_factory=list)
    may_extend: list[Callable[[int, int], str]] = field(default_factory=list)
    may_leave: list[Callable[[Sequence], bool]] = field(default_factory=list)
    plan_open: list[Callable[[int], int]] = field(default_factory=list)
    take_turns: list[Callable[[Rows[Sequence], Rows[Sequence]], Iterable[Sequence]]] = field(
        default_factory=list
    )
    give_seat: list[Callable[[Sequence], bool]] = field(default_factory=list)
    plan_victim: list[Callable[[Rows[Sequence]], Sequence | None]] = field(default_factory=list)
    plan_decode: list[Callable[[Sequence, Slice, int], Slice]] = field(default_factory=list)
    plan_prefill: list[Callable[[Sequence, Slice], Slice]] = field(default_factory=list)
    plan_prompts: list[Callable[[], None]] = field(default_factory=list)
    plan_drafts: list[Callable[[int], None]] = field(default_factory=list)
    plan_trail: list[Callable[[], None]] = field(default_factory=list)
    plan_boundary: list[Callable[[Sequence, int], int | None]] = field(default_factory=list)
    plan_close: list[Callable[[], bool]] = field(default_factory=list)
    reclaim: list[Callable[[Holding], bool]] = field(default_factory=list)
    has_work: list[Callable[[], bool]] = field(default_factory=list)
    attach: list[Callable[[Loop], None]] = field(default_factory=list)
    on_planned: list[Callable[[], None]] = field(default_factory=list)
    is_busy: list[Callable[[], bool]] = field(default_factory=list)
    on_answering: list[Callable[[SequenceGroup], None]] = field(default_factory=list)
    report_first: list[Callable[[Sequence, Delta], Delta]] = field(default_factory=list)
    report_last: list[Callable[[Sequence, Delta], Delta]] = field(default_factory=list)
    on_finished: list[Callable[[SequenceGroup], None]] = field(default_factory=list)
    on_published: list[Callable[[], None]] = field(default_factory=list)
    on_idle: list[Callable[[], None]] = field(default_factory=list)
    on_time: list[Callable[[], None]] = field(default_factory=list)
    seconds_left: list[Callable[[], float]] = field(default_factory=list)
    close: list[Callable[[], None]] = field(default_factory=list)

    def add(self, feature: object, concerns: Callable[[Request], bool] | None = None) -> None:
        """Call a feature's methods from now on, after those of the features added before.

        Args:
            feature: has methods with the names of hooks.
            concerns: tells whether it has to do with a request. Of the others it is told nothing,
                and while there is no such request its methods for whole steps are not called.
        """
        busy = getattr(feature, "is_busy", lambda: False)
        gate = _Gate(self, busy) if concerns is not None else None
        for name in self.__slots__:
            method = getattr(feature, name, None)
            if method is None:
                continue
            if concerns is not None and name in _OF_ONE:
                method = _only(concerns, method, _OF_ONE[name])
            if gate is not None and name in _OF_STEPS:
                gate.methods.append((name, method))
            else:
                getattr(self, name).append(method)
        if gate is not None and concerns is not None and gate.methods:
            self.on_added.append(_only(concerns, gate.enter, _nothing))
            self.on_ended.append(_only(concerns, gate.leave, _nothing))


def _nothing(*arguments: object) -> None:
    """Return None, for a notice."""


def _yes(*arguments: object) -> bool:
    """Return True, for a veto."""
    return True


def _unchanged(subject: object, value: object) -> object:
    """Return the value that a feature could have changed."""
    return value


_OF_ONE: dict[str, Callable[..., Any]] = {
    "on_added": _nothing,
    "on_rekeyed": _nothing,
    "on_matching": _nothing,
    "on_admitted": _nothing,
    "on_matched": _nothing,
    "on_forked": _nothing,
    "on_answering": _nothing,
    "on_ended": _nothing,
    "may_start": _yes,
    "may_follow": _yes,
    "may_prefill": _unchanged,
    "plan_prefill": _unchanged,
    "report_first": _unchanged,
    "report_last": _unchanged,
}
"""Hooks about a single request or sequence, with what is called for one that does not concern."""

_OF_STEPS = (
    "on_learned",
    "on_output",
    "on_computed",
    "on_committed",
    "plan_open",
    "plan_drafts",
    "plan_trail",
)
"""Hooks about a whole step that a feature needs only while some request concerns it."""


class _Gate:
    """Has the methods of a feature for whole steps called while a request concerns it, or while it
    waits for another thread on behalf of one that has ended: only a step takes in what comes.

    Args:
        hooks: where they are called.
        busy: tells whether the feature waits.

    Attributes:
        methods: name of the hook, and method.
    """

    def __init__(self, hooks: Hooks, busy: Callable[[], bool]) -> None:
        self.methods: list[tuple[str, Callable[..., Any]]] = []
        self._hooks = hooks
        self._busy = busy
        self._numbers: set[int] = set()
        self._open = False

    def enter(self, group: SequenceGroup) -> None:
        """Begin with a request."""
        self._numbers.update(sequence.number for sequence in group.sequences)
        if not self._open:
            self._open = True
            self._hooks.plan_open.append(self._close_if_over)
            for name, method in self.methods:
                getattr(self._hooks, name).append(method)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; its last step is still told of."""
        self._numbers.discard(sequence.number)

    def _close_if_over(self, room: int) -> int:
        if not (self._numbers or self._busy()):
            self._open = False
            self._hooks.plan_open.remove(self._close_if_over)
            for name, method in self.methods:
                getattr(self._hooks, name).remove(method)
        return 0


def _only(
    concerns: Callable[[Request], bool], method: Callable[..., Any], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls `method` for a subject whose request concerns."""

    def call(subject: Any, *arguments: Any) -> Any:
        chosen = method if concerns(subject.request) else otherwise
        return chosen(subject, *arguments)

    return call
