"""The table of features: what hangs on the hooks of the core step, in which order, and when.

A feature touches its folder and its row here. Its methods are those of `hooks.Hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from vlm_serve.cache.tier_fetching import TierFetcher
from vlm_serve.engine.core.planning import SchedulerConfig
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.features.adapters.slots import AdapterSlots
from vlm_serve.engine.features.adapters.store import AdapterStore
from vlm_serve.engine.features.adapters.waiting import AdapterWaiting
from vlm_serve.engine.features.cache_log import CacheLog
from vlm_serve.engine.features.drafts.base import Drafter
from vlm_serve.engine.features.drafts.drafting import Drafting
from vlm_serve.engine.features.drafts.lengths import CostCurve
from vlm_serve.engine.features.endings.endings import Endings
from vlm_serve.engine.features.joins import Joining
from vlm_serve.engine.features.pause import Pause
from vlm_serve.engine.features.progress import Progress
from vlm_serve.engine.features.prompt_logprobs import LogprobReports
from vlm_serve.engine.features.replays import Replays
from vlm_serve.engine.features.routed_experts import ExpertReports
from vlm_serve.engine.features.shares import Shares
from vlm_serve.engine.features.tiers.fetching import Fetching
from vlm_serve.engine.features.unread import Unread
from vlm_serve.engine.features.weights import WeightReader, WeightUpdates
from vlm_serve.engine.requests.request import Request

_T = TypeVar("_T")


@dataclass(frozen=True)
class Options:
    """Limits and parts that features need beside the scheduler.

    Attributes:
        config: limits.
        fetcher: fetches entries from lower cache tiers; None if there are no tiers.
        drafters: sources of drafts; empty disables drafts.
        costs: duration of a step by its rows.
        pass_costs: duration of a pass of the model's MTP layer, by number of sequences.
        never_drafted: tokens that are never drafted.
        slots: slots of adapters; None: no request has one.
        weights: reads other weights; None: they do not change.
        adapters: of the engine, beside these.
    """

    config: SchedulerConfig
    fetcher: TierFetcher | None = None
    drafters: Tokens[Drafter] = ()
    costs: CostCurve = field(default_factory=CostCurve)
    pass_costs: CostCurve | None = None
    never_drafted: frozenset[int] = frozenset()
    slots: AdapterSlots | None = None
    weights: WeightReader | None = None
    adapters: AdapterStore | None = None


class FeatureRow(NamedTuple):
    """One feature.

    Attributes:
        name: for messages and tests.
        make: returns the feature, or None if it is off.
        concerns: tells which requests it has to do with; None: all.
        commutes: False if its place among the features of one hook has meaning.
    """

    name: str
    make: Callable[[Scheduler, Options], object | None]
    concerns: Callable[[Request], bool] | None = None
    commutes: bool = True


def _joins(scheduler: Scheduler, options: Options) -> Joining | None:
    queues = scheduler.queues
    return Joining(queues, scheduler.admitter) if queues.cache.config.enabled else None


def _endings(scheduler: Scheduler, options: Options) -> Endings | None:
    config, cache = options.config, scheduler.queues.cache.config
    if config.answer_ends == "off" or not (cache.enabled and cache.has_state):
        return None
    return Endings(scheduler.queues, config.answer_ends, config.max_num_seqs)


def _drafts(scheduler: Scheduler, options: Options) -> Drafting | None:
    config = options.config
    if not options.drafters:
        return None
    return Drafting(
        scheduler.queues,
        options.drafters,
        most=config.speculative_tokens,
        sequences=config.max_num_seqs,
        costs=options.costs,
        pass_costs=options.pass_costs,
        state_interval=config.decode_state_interval,
        never=options.never_drafted,
    )


def _replays(scheduler: Scheduler, options: Options) -> Replays:
    return Replays(scheduler.queues, options.config.decode_state_interval)


def _fetching(scheduler: Scheduler, options: Options) -> Fetching | None:
    if options.fetcher is None:
        return None
    return Fetching(options.fetcher, scheduler.hooks, scheduler.queues.cache)


def _shares(scheduler: Scheduler, options: Options) -> Shares:
    return Shares(scheduler.queues)


def _unread(scheduler: Scheduler, options: Options) -> Unread:
    return Unread(scheduler.queues)


def _experts(scheduler: Scheduler, options: Options) -> ExpertReports:
    return ExpertReports(scheduler.queues.cache, complete=options.config.complete_experts)


def _logprobs(scheduler: Scheduler, options: Options) -> LogprobReports:
    return LogprobReports(options.config.reported_tokens)


def _progress(scheduler: Scheduler, options: Options) -> Progress:
    return Progress()


def _cache_log(scheduler: Scheduler, options: Options) -> CacheLog | None:
    return CacheLog(scheduler.queues) if CacheLog.wanted() else None


def _adapters(scheduler: Scheduler, options: Options) -> AdapterWaiting | None:
    return None if options.slots is None else AdapterWaiting(scheduler.queues, options.slots)


def _weights(scheduler: Scheduler, options: Options) -> WeightUpdates | None:
    reader, adapters = options.weights, options.adapters
    return None if reader is None else WeightUpdates(scheduler, reader, adapters)


def _pause(scheduler: Scheduler, options: Options) -> Pause | None:
    return None if options.weights is None else Pause(scheduler)


TABLE = (
    FeatureRow("weights", _weights),
    FeatureRow("pause", _pause),
    FeatureRow("shares", _shares),
    FeatureRow("unread", _unread),
    FeatureRow("joins", _joins),
    FeatureRow("replays", _replays, concerns=lambda request: bool(request.forced)),
    FeatureRow("endings", _endings),
    FeatureRow("fetching", _fetching),
    FeatureRow("drafts", _drafts),
    FeatureRow("experts", _experts, concerns=lambda request: request.params.return_routed_experts),
    FeatureRow(
        "log-probabilities",
        _logprobs,
        concerns=lambda request: request.params.prompt_logprobs is not None,
    ),
    FeatureRow("cache log", _cache_log),
    FeatureRow("progress", _progress, concerns=lambda request: request.progress),
    # Whoever may start gets its adapter loaded, so nothing else may refuse it behind this.
    FeatureRow(
        "adapters", _adapters, concerns=lambda request: request.adapter is not None, commutes=False
    ),
)


class Features:
    """The features of an engine that are on.

    Args:
        scheduler: the core whose hooks they use.
        options: what they need beside it.
        table: their rows, in order.
    """

    def __init__(
        self, scheduler: Scheduler, options: Options, table: Iterable[FeatureRow] = TABLE
    ) -> None:
        self._by_type: dict[type[Any], object] = {}
        self._by_name: dict[str, object] = {}
        for row in table:
            feature = row.make(scheduler, options)
            if feature is not None:
                self._by_type[type(feature)] = self._by_name[row.name] = feature
                scheduler.hooks.add(feature, row.concerns)

    def items(self) -> Iterable[tuple[str, object]]:
        """Return the features by their names in the table, in order."""
        return self._by_name.items()

    def get(self, kind: type[_T]) -> _T | None:
        """Return the feature of this class; None if it is off."""
        return cast("_T | None", self._by_type.get(kind))
