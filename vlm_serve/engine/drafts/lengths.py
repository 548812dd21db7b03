"""Chooses how many drafts are worth it: the cost of additional rows against the probability of
acceptance."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from vlm_serve.engine.drafts.acceptance import Acceptance


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
        points: Sequence[tuple[int, float]] = (),
        *,
        sequence: float = 0.0,
        tokens: int = 1,
        plain: Sequence[tuple[int, float]] = (),
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
    acceptances: Sequence[Acceptance],
    limits: Sequence[int],
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
    each = pass_costs.seconds(count) if pass_costs is not None and count else 0.0
    for depth in range(max(limits, default=0) + 1):
        tokens = count + sum(
            acceptance.expected_accepted(min(depth, limit))
            for acceptance, limit in zip(acceptances, limits, strict=True)
        )
        rows = count + sum(min(depth, limit) for limit in limits)
        seconds = costs.seconds(rows, count) + depth * each
        if tokens / seconds >= best:
            best, chosen = tokens / seconds, depth
    if chosen:
        return [min(chosen, limit) for limit in limits]
    for acceptance in acceptances:
        acceptance.paused += 1
    return [int(acceptance.paused >= acceptance.pause) for acceptance in acceptances]


def share(
    candidates: Sequence[Candidate], *, rows: int, decodes: int, budget: int, costs: CostCurve
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
