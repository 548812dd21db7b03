"""How many drafts are worth it: what a row more costs a step against how likely a draft holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from vlm_serve.engine.drafts.acceptance import Acceptance


class CostCurve:
    """Seconds of a step by its rows: straight lines between what was measured.

    Args:
        points: (rows, seconds), ascending in both; none: rows cost nothing.
        sequence: seconds that a sequence more takes beside as many rows.
        tokens: rows of a sequence in what was measured.
        plain: (sequences, seconds) of steps without drafts, where those run from graphs, which
            take a fraction of the time; none: they take what as many rows take.
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
        """Whether steps without drafts cost less than as many rows."""
        return self._plain is not None

    def seconds(self, rows: int, sequences: int = 0) -> float:
        """Of a step of `rows`, of so many sequences or more; of as many, if none has drafts."""
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
    """What is known of a sequence's drafts: how others of their drafter have done, how many there
    are, and what speaks for the first."""

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
    """How many drafts in a row the model's own layer is to make for each sequence, so that making
    and verifying them together pays most.

    Args:
        trusts: of each sequence how its drafts have done.
        rooms: of each the most that fit.
        costs: of a step by its rows.
        pass_costs: of a pass of the layer, which drafts one token for all, by sequences.
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
    """How many drafts each sequence gets, so that the step makes the most tokens in a second.

    Args:
        wishes: of each sequence.
        rows: tokens of the step without drafts.
        decodes: of those, the ones that make a token each.
        budget: most drafts in all.
        costs: of a step.
    """
    if costs.has_graphs and rows > decodes:
        return [0] * len(candidates)  # Beside prompts too a step without drafts is the cheaper one.
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
