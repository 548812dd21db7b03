"""Components of an engine, assembled by `build`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vlm_serve.cache.prefix_cache import PrefixCache
from vlm_serve.engine.core.executor import Executor
from vlm_serve.engine.core.media import MediaPlanner
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.features.adapters.store import AdapterStore
from vlm_serve.engine.features.table import Features
from vlm_serve.engine.features.tiers.loading import Tiers
from vlm_serve.engine.numerics.arithmetic import Arithmetic
from vlm_serve.engine.requests.request import Language
from vlm_serve.engine.start.machine_sizes import MachineSizes
from vlm_serve.engine.steps.memory import MemoryPlan, StepMemory
from vlm_serve.models import ModelSpec
from vlm_serve.models.weight_sizes import WeightBytes
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.prepare import Preprocessor


@dataclass(frozen=True)
class EngineParts:
    """Components of an engine. `config` has its defaults filled in. `steps` is None where it is not
    measured. `degraded`: why steps are much slower than they could be. `make_preprocessor` can be
    pickled. `release` gives the memory of the pools back; None: that is not possible here."""

    config: EngineConfig
    spec: ModelSpec
    arithmetic: Arithmetic
    weights: WeightBytes
    memory: MemoryPlan
    preprocessor: Preprocessor
    make_preprocessor: Callable[[], Preprocessor]
    language: Language
    scheduler: Scheduler
    features: Features
    adapters: AdapterStore
    executor: Executor
    cache: PrefixCache
    media: MediaPlanner
    release: Callable[[], None] | None = None
    tiers: Tiers | None = None
    steps: StepMemory | None = None
    machine: MachineSizes | None = None
    degraded: str | None = None
