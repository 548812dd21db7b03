"""The state of a server: its model's names, statistics and stored answers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from vlm_serve.errors import ModelNotFoundError
from vlm_serve.preprocess.identity.keys import NO_ADAPTER, KeyScope
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.held_media import ClientMedia, HeldMedia, StoredMedia
from vlm_serve.server.http.auth import owner_of, salt_of
from vlm_serve.server.http.request_memory import RequestMemory
from vlm_serve.server.metrics import FinishedRequest, Metrics
from vlm_serve.server.prompt_records import PromptRecords
from vlm_serve.server.response_store import ResponseStore

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine
    from vlm_serve.engine.features.adapters.store import AdapterStore
    from vlm_serve.server.tracing import RequestTracer


class ServerState:
    """State of one server. It is used on the event loop only.

    Args:
        engine: the engine that answers.
        config: the server's options.
        model_names: names under which requests may ask for the model; the first is canonical.
        memory: the budget of open requests.

    Attributes:
        created: Unix time in seconds that lists of models give.
        media: media that requests may name; None: none are held.
        stored_media: files of media; None: none are stored. A mounted folder sets it.
        responses: stored answers of /v1/responses; None: nothing is stored.
        prompts: records of earlier prompts.
        metrics: metrics in Prometheus' form.
        tracer: exporter of traces; None: traces are off.
        first_token_seconds: latencies of the last minute, from a request's arrival.
        inter_token_seconds: those between two tokens of one choice.
        num_generated_tokens: tokens generated so far for all requests.
        busy_since: monotonic time at which the engine last got work while it had none.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        model_names: tuple[str, ...],
        memory: RequestMemory,
    ) -> None:
        assert model_names
        size = config.response_store_bytes
        self.model_names = model_names
        self.created = int(time.time())
        self.media = HeldMedia(config.media_store_bytes) if config.media_store_bytes else None
        self.stored_media: StoredMedia | None = None
        self.responses = ResponseStore(size, config.response_store_ttl) if size else None
        self.prompts = PromptRecords()
        self.metrics = Metrics(model_names[0], engine, memory)
        self.tracer: RequestTracer | None = None
        self.first_token_seconds, self.inter_token_seconds = LatencyWindow(), LatencyWindow()
        self.num_generated_tokens = 0
        self.busy_since = time.monotonic()
        self._engine = engine
        self._adapters: AdapterStore = engine.adapters
        self._logs_requests = config.access_log
        self._reading: asyncio.Future[dict[str, Any]] | None = None

    def resolve_model(self, name: str | None) -> str:
        """Return the name to answer with.

        Raises:
            ModelNotFoundError: the server has no model of that name.
        """
        if not name:
            return self.model_names[0]
        if name not in self.model_names and self._adapters.find(name) is None:
            raise self.unknown_model(name)
        return name

    def key_scope(self, scope: Scope, model: str | None, cache_salt: str | None) -> KeyScope:
        """Return whose prompt a request has: its tenant's, and its adapter's.

        Args:
            model, cache_salt: the body's.

        Raises:
            ModelNotFoundError: the server has no model of that name.
            InvalidRequestError: as `salt_of`.
        """
        name = self.resolve_model(model)
        served = None if name in self.model_names else self._adapters.find(name)
        adapter = NO_ADAPTER if served is None else served.identity
        return KeyScope(salt_of(scope, cache_salt), adapter)

    def client_media(
        self, scope: Scope, cache_salt: str | None, *, tells: bool = False
    ) -> ClientMedia:
        """Return the media that a request may name.

        Args:
            cache_salt: the body's.
            tells: the answer tells hashes of media.

        Raises:
            InvalidRequestError: as `salt_of`.
        """
        owner, keeper = owner_of(scope, cache_salt), owner_of(scope, None)
        return ClientMedia(self.media, self.stored_media, owner, keeper, tells)

    def affinity_name(self, name: object) -> str:
        """Return the name that affinity keys have for a request's `model`: an adapter's, or else
        the model's canonical one."""
        known = isinstance(name, str) and name not in self.model_names
        return name if known and self._adapters.find(name) else self.model_names[0]  # type: ignore[arg-type,return-value]

    def unknown_model(self, name: str) -> ModelNotFoundError:
        """Return the error for an unknown name."""
        return ModelNotFoundError(
            f"the model {name[:128]!r} does not exist; this server has "
            + ", ".join((*self.model_names, *(adapter.name for adapter in self._adapters.all()))),
            param="model",
            code="model_not_found",
        )

    def record_next_token(self, seconds: float) -> None:
        """Record the seconds between two tokens of one choice."""
        self.metrics.inter_token_latency.add(seconds)
        self.inter_token_seconds.add(seconds)

    def record_finished(self, finished: FinishedRequest) -> None:
        """Record a finished request in metrics, access log and traces."""
        self.metrics.finished(finished)
        if self._logs_requests:
            finished.log()
        if self.tracer is not None:
            self.tracer.record(finished)

    async def refresh_engine_stats(self, timeout: float) -> None:
        """Copy the engine's counters into the metrics.

        An engine in a long step is waited for up to the timeout, and not asked again before it
        has answered.

        Args:
            timeout: seconds.
        """
        reading = self._reading
        if reading is None or reading.done():
            reading = asyncio.ensure_future(asyncio.to_thread(self._engine.stats))
            self._reading = reading
        await asyncio.wait({reading}, timeout=timeout)
        if reading.done() and reading.exception() is None:
            stats = reading.result()
            own = 0 if self.responses is None else self.responses.held_bytes
            media = 0 if self.media is None else self.media.num_bytes
            held = {**stats["held_bytes"], "responses": own, "held_media": media}
            self.metrics.engine_stats.update({**stats, "held_bytes": held})


WINDOW_SECONDS = 60.0
MAX_SAMPLES = 4096
"""Beyond this the oldest samples are dropped."""


class LatencyWindow:
    """Samples of the last minute, for percentiles of latencies.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def add(self, value: float) -> None:
        """Add a sample."""
        self._samples.append((self._clock(), value))

    def percentiles(self) -> dict[str, float | int | None]:
        """Return median, 99th percentile and number of the samples; None without samples."""
        oldest = self._clock() - WINDOW_SECONDS
        while self._samples and self._samples[0][0] < oldest:
            self._samples.popleft()
        values = sorted(value for _, value in self._samples)
        if not values:
            return {"p50": None, "p99": None, "count": 0}
        last = len(values) - 1
        return {
            "p50": values[round(last * 0.5)],
            "p99": values[round(last * 0.99)],
            "count": len(values),
        }
