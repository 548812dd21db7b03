"""Split the speed that drafts lose against measured products into factors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, ParamSpec, TypeVar

from vlm_serve.engine.core.slicing import max_drafts
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.drafts.drafting import Drafting
from vlm_serve.engine.features.drafts.lengths import CostCurve
from vlm_serve.engine.requests.plan import StepOutput, StepPlan
from vlm_serve.engine.steps import local_executor

_P = ParamSpec("_P")
_T = TypeVar("_T")

HEADINGS = ("unknowable", "drafts", "fewer rows", "verifying", "outside", "share")


@dataclass(frozen=True)
class Spent:
    """Steps, and what they took in seconds.

    Attributes:
        steps: how many.
        seconds, host: all of it, and what of it was outside of the model.
        products: what as many rows took when they were measured at start.
        drafting, sampling: parts of `host`.
    """

    steps: float = 0.0
    seconds: float = 0.0
    host: float = 0.0
    products: float = 0.0
    drafting: float = 0.0
    sampling: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def a_step(self) -> str:
        """Milliseconds of a step, and of them those outside of the model: drafting, sampling."""
        each = 1000 / max(1.0, self.steps)
        parts = f"{each * self.drafting:.2f} + {each * self.sampling:.2f}"
        return f"{each * self.seconds:.2f} ({each * self.host:.2f}: {parts})"


class Meter:
    """Counts what an engine's steps take from now on.

    Attributes:
        costs: of rows, as measured at start.
        most: tokens of a sequence in a step, if as many run as may.
    """

    def __init__(self, engine: Engine) -> None:
        drafting = engine._features.get(Drafting)
        assert drafting is not None
        self.costs = drafting.costs
        self.most = engine.config.speculative_tokens + 1
        self._sequences = engine.config.max_num_seqs
        self._loop = engine._loop
        self._products = 0.0
        self._seconds = {"drafting": 0.0, "sampling": 0.0}
        self._run = self._loop._executor.run
        for owner, name, value in (
            (drafting, "extend", self._timed("drafting", drafting.extend)),
            (local_executor, "sample", self._timed("sampling", local_executor.sample)),
            (self._loop._executor, "run", self._counted),
        ):
            setattr(owner, name, value)

    def most_of(self, batch: int) -> int:
        """Tokens of a sequence in a step while so many run."""
        return 1 + max_drafts(self.most - 1, batch, self._sequences)

    def now(self) -> Spent:
        """Since the engine began."""
        loop = self._loop
        host = loop.step_times.host_seconds
        parts: dict[str, Any] = self._seconds
        return Spent(loop.num_steps, time.perf_counter(), host, self._products, **parts)

    def _timed(self, name: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
        def run(*args: _P.args, **options: _P.kwargs) -> _T:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self._seconds[name] += time.perf_counter() - begin

        return run

    def _counted(self, plan: StepPlan) -> StepOutput:
        self._products += self.costs.seconds(plan.num_tokens, len(plan.slices))
        return self._run(plan)


def bound(costs: CostCurve, batch: int, most: int) -> float:
    """What steps of `most` tokens of each sequence allow if every draft holds."""
    return costs.seconds(batch) * most / costs.seconds(batch * most)


def losses(
    plain: Spent, drafted: Spent, *, known: float, costs: CostCurve, batch: int, most: int
) -> list[float]:
    """Factors, and as the last one their product: the share of the bound that was reached.

    Args:
        plain, drafted: what the same answers took without drafts and with them.
        known: of the most tokens of a step, the share of those that would come if all that a form
            tells were drafted, and the rest guessed.
        costs: of rows.
        batch, most: sequences, and tokens of each in a step at most.

    Returns:
        What is left of the bound by what nobody can know; of that by drafts that did not hold or
        were not made; what is saved by the rows of those that were not; what is left by the model's
        time beside that of as many rows at start; by the time outside of the model.
    """
    held = plain.steps / drafted.steps / most
    model = [each.seconds - each.host for each in (plain, drafted)]
    saved = costs.seconds(batch * most) / costs.seconds(batch)
    saved *= (plain.products / plain.steps) / (drafted.products / drafted.steps)
    verifying = model[0] / plain.products / (model[1] / drafted.products)
    outside = plain.seconds / model[0] / (drafted.seconds / model[1])
    factors = [known, held / known, saved, verifying, outside]
    return [*factors, math.prod(factors)]
