"""Chooses how many drafts are worth it: the cost of additional rows against the probability of
acceptance, which is learned from earlier drafts with the same evidence."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from vlm_serve.engine.features.drafts.base import MAX_EVIDENCE
from vlm_serve.engine.requests.sequence import Sequence

_FIRST_RATE = 0.7
_WEIGHT, _COMMON_WEIGHT = 0.2, 0.02
_FIRST_PAUSE, _MAX_PAUSE = 8, 256
_MAX_TENANTS = 1024


@dataclass(slots=True)
class Acceptance:
    """Recent acceptance rates of one drafter.

    Attributes:
        rates: by evidence, the probability that a draft is accepted if all before it are.
        pause: number of steps without drafts, while they are not worth it, before one is tried.
        paused: number of such steps so far.
    """

    rates: list[float] = field(default_factory=lambda: [_FIRST_RATE] * (MAX_EVIDENCE + 1))
    pause: int = _FIRST_PAUSE
    paused: int = 0

    def chances(self, drafted: int, evidence: int = 0) -> list[float]:
        """Return for each of `drafted` drafts the probability that it and all before it are
        accepted.

        Args:
            evidence: evidence for the first draft.
        """
        levels = range(evidence, evidence + drafted)
        return list(accumulate((self.rates[min(level, MAX_EVIDENCE)] for level in levels), mul))

    def expected_accepted(self, drafted: int, evidence: int = 0) -> float:
        """Return the expected number of accepted drafts."""
        return sum(self.chances(drafted, evidence))

    def learn(
        self, drafted: int, accepted: int, evidence: int = 0, weight: float = _WEIGHT
    ) -> None:
        """Record that the first `accepted` of `drafted` drafts were accepted and the next one was
        not."""
        rates = self.rates
        for place, held in enumerate((True,) * accepted + (False,) * (accepted < drafted)):
            level = min(evidence + place, MAX_EVIDENCE)
            rates[level] += weight * (held - rates[level])
        self.paused = 0
        failed = drafted and not accepted
        self.pause = min(2 * self.pause, _MAX_PAUSE) if failed else _FIRST_PAUSE


class AcceptanceTracker:
    """Tracks acceptance rates by sequence and drafter. A new sequence starts with the rates of its
    tenant; a new tenant starts with a guess."""

    def __init__(self) -> None:
        self._by_sequence: dict[int, dict[int, Acceptance]] = {}
        self._common: OrderedDict[tuple[bytes, int], Acceptance] = OrderedDict()

    def of(self, sequence: Sequence, drafter: int) -> Acceptance:
        by_drafter = self._by_sequence.setdefault(sequence.number, {})
        if drafter not in by_drafter:
            common = self._common.get((sequence.keys.owners.prompt, drafter), Acceptance())
            by_drafter[drafter] = Acceptance(common.rates.copy())
        return by_drafter[drafter]

    def learn(
        self, sequence: Sequence, drafter: int, evidence: int, drafted: int, accepted: int
    ) -> None:
        """Record how many of a sequence's drafts were accepted; `evidence` is that of the first."""
        self.of(sequence, drafter).learn(drafted, accepted, evidence)
        place = (sequence.keys.owners.prompt, drafter)
        self._common.setdefault(place, Acceptance()).learn(
            drafted, accepted, evidence, _COMMON_WEIGHT
        )
        self._common.move_to_end(place)
        if len(self._common) > _MAX_TENANTS:
            self._common.popitem(last=False)

    def forget(self, sequence: Sequence) -> None:
        """Drop the data of a finished sequence."""
        self._by_sequence.pop(sequence.number, None)


class CostCurve:
    """Duration of a step by its rows: linear interpolation between measured points.

    Args:
        points: (rows, seconds), ascending in both; if empty, rows cost nothing.
        sequence: additional seconds for each further sequence with the same number of rows.
        tokens: rows per sequence in the measured steps.
        plain: (sequences, seconds) of steps without drafts, if these run from graphs, which are
            much faster. If empty, they take as long as other steps with as many rows.
    """

    def __init__(
        self,
        points: Values[tuple[int, float]] = (),
        *,
        sequence: float = 0.0,
        tokens: int = 1,
        plain: Values[tuple[int, float]] = (),
    ) -> None:
        self._points = list(points) or [(1, 1.0)]
        self._sequence = sequence
        self._tokens = tokens
        self._plain = CostCurve(plain) if plain else None

    @property
    def has_graphs(self) -> bool:
        """True if steps without drafts cost less than others with as many rows."""
        return self._plain is not None

    def seconds(self, rows: int, sequences: int = 0) -> float:
        """Return the duration of a step of `rows` rows and at least `sequences` sequences. With no
        more rows than sequences, the step has no drafts."""
        if self._plain is not None and rows <= sequences:
            return self._plain.seconds(rows)
        more = max(0, sequences - -(-rows // self._tokens))
        return self._together(rows) + self._sequence * more

    def _together(self, rows: int) -> float:
        points = self._points
        right = bisect_left(points, (rows,))
        if right < len(points) and points[right][0] == rows:
            return points[right][1]
        if right == 0 or len(points) == 1:
            return points[0][1]
        (low, less), (high, more) = (
            points[right - 1 : right + 1] if right < len(points) else (points[-2:])
        )
        return less + (more - less) * (rows - low) / (high - low)


class Candidate(NamedTuple):
    """Candidate drafts of a sequence: acceptance rates of their drafter, number of drafts, and
    evidence for the first one."""

    acceptance: Acceptance
    drafts: int
    evidence: int = 0


def depths(
    acceptances: Values[Acceptance],
    limits: Values[int],
    *,
    costs: CostCurve,
    pass_costs: CostCurve | None,
) -> list[int]:
    """Choose for each sequence how many drafts in a row the MTP layer makes. The depth maximises
    tokens per second of drafting and verifying together.

    Args:
        acceptances: acceptance rates of each sequence.
        limits: maximum number of drafts of each sequence.
        costs: duration of a step by its rows.
        pass_costs: duration of a pass of the layer, which drafts one token for all sequences, by
            number of sequences.
    """
    count, best, chosen = len(acceptances), 0.0, 0
    pass_seconds = pass_costs.seconds(count) if pass_costs is not None and count else 0.0
    for depth in range(max(limits, default=0) + 1):
        tokens = count + sum(
            acceptance.expected_accepted(min(depth, limit))
            for acceptance, limit in zip(acceptances, limits, strict=True)
        )
        rows = count + sum(min(depth, limit) for limit in limits)
        seconds = costs.seconds(rows, count) + depth * pass_seconds
        if tokens / seconds >= best:
            best, chosen = tokens / seconds, depth
    if chosen:
        return [min(chosen, limit) for limit in limits]
    for acceptance in acceptances:
        acceptance.paused += 1
    return [int(acceptance.paused >= acceptance.pause) for acceptance in acceptances]


def share(
    candidates: Values[Candidate], *, rows: int, decodes: int, budget: int, costs: CostCurve
) -> list[int]:
    """Choose how many drafts each sequence gets, so that the step yields the most tokens per
    second.

    Args:
        candidates: candidate drafts of each sequence.
        rows: tokens of the step without drafts.
        decodes: how many of the rows yield a token each.
        budget: maximum number of drafts in total.
        costs: duration of a step.
    """
    if costs.has_graphs and rows > decodes:
        # With graphs, steps without drafts are faster beside prompts too.
        return [0] * len(candidates)
    chances = sorted(
        (
            (chance, -index)
            for index, candidate in enumerate(candidates)
            for chance in candidate.acceptance.chances(candidate.drafts, candidate.evidence)
        ),
        reverse=True,
    )[:budget]
    best, wanted, tokens = decodes / costs.seconds(rows, decodes), 0, float(decodes)
    for number, (chance, _) in enumerate(chances, 1):
        tokens += chance
        speed = tokens / costs.seconds(rows + number, decodes)
        if speed >= best:
            best, wanted = speed, number
    lengths = [0] * len(candidates)
    for _, index in chances[:wanted]:
        lengths[-index] += 1
    for index, (acceptance, drafts, _) in enumerate(candidates):
        if not lengths[index] and drafts and sum(lengths) < budget:
            acceptance.paused += 1
            lengths[index] = int(acceptance.paused >= acceptance.pause)
    return lengths
