"""Facts about finished requests: Prometheus metrics under the names in dashboards of other
engines, and the access log."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    values,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from vlm_serve.engine.requests.outputs import CacheReport, Usage
from vlm_serve.server.http.request_memory import RequestMemory
from vlm_serve.system.host_memory import free_bytes

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine

# A single process keeps its values in memory. PROMETHEUS_MULTIPROC_DIR, which the environment may
# set for servers of several processes, would put them into files of a folder that may be missing.
values.ValueClass = values.MutexValue

PREFIX = "vlm_serve:"
PLAIN_PREFIX = "vlm_serve_"
SHARED_EVENTS = ("hits", "misses", "bad", "incomplete", "written", "skipped", "refused")
COUNTERS = {
    "drafts": (
        ("spec_decode_num_drafts", "Slices of drafts that were verified", "drafts"),
        ("spec_decode_num_draft_tokens", "Drafted tokens", "draft_tokens"),
        ("spec_decode_num_accepted_tokens", "Drafted tokens that held", "accepted_tokens"),
    ),
    "replays": (
        ("replayed_requests", "Answers that began on another replica", "requests"),
        ("replayed_tokens", "Of those, tokens that came again", "tokens"),
        ("replay_disagreements", "Of those, where another token was drawn", "disagreements"),
    ),
    "audit": (
        ("cache_audit_audits", "Hits that were run again cold and compared", "audits"),
        ("cache_audit_mismatches", "Audits that found another answer", "mismatches"),
        (
            "cache_audit_near_ties",
            "Audits that found another answer of about the same likelihood",
            "near_ties",
        ),
        ("cache_audit_dropped", "Audits given up before they had a result", "dropped"),
    ),
}
"""Part of the engine's statistics -> name, help and key of each of its counters."""
ADAPTER_COUNTS = {
    "requests": "Ended requests with an adapter",
    "prompt_tokens": "Their prompt tokens, cached ones included",
    "cached_tokens": "Of those, tokens found in the prefix cache",
    "generated_tokens": "Their generated tokens",
    "draft_tokens": "Tokens drafted for them",
    "accepted_tokens": "Of those, tokens that held",
}
KNOWN_TEXT = ("part_hits", "part_misses", "prompt_hits", "prompt_misses")
TENANT_COUNTS = {
    "requests": "Ended requests of a tenant",
    "prompt_tokens": "Their prompt tokens, cached ones included",
    "cached_tokens": "Of those, tokens found in the prefix cache",
    "generated_tokens": "Their generated tokens",
    "given_up_seats": "Times that a running sequence gave up its seat for another tenant",
}
RECENT = 1000
"""Requests that the gauge of the hit rate looks back on."""
EVICTED_KINDS = ("kv", "tail", "snapshot", "suspended", "timed_pin")

Values = float | Mapping[str, float]
FamilyType = type[CounterMetricFamily] | type[GaugeMetricFamily]

_SECONDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip

_access = logging.getLogger("vlm_serve.access")


class Metrics:
    """The metrics of one server, labelled with the model's name.

    They are in registries separate from the library's default. Each metric also has a name without
    a colon, since Prometheus reserves colons for recording rules.
    """

    def __init__(self, model_name: str, engine: Engine, memory: RequestMemory) -> None:
        self._registry = CollectorRegistry()
        self._plain = CollectorRegistry()
        self._plain.register(PlainNames(self._registry))
        ProcessCollector(registry=self._plain)
        self._model_name = model_name
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _SECONDS
        )
        self.inter_token_latency = TokenTimes(model_name)
        self._registry.register(self.inter_token_latency)
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token", _SECONDS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, cached ones included")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self.mm_cache_queries = self._counter("mm_cache_queries", "Images and videos in prompts")
        self.mm_cache_hits = self._counter(
            "mm_cache_hits", "Images and videos that needed no vision encoding"
        )
        self.mm_decodes_skipped = self._counter(
            "mm_decodes_skipped", "Images and videos that were known without being decoded"
        )
        self.media_cut_short = self._counter(
            "media_cut_short", "Videos of which a part is missing or does not decode"
        )
        self.check_failures = self._counter(
            "idle_check_failures", "Idle checks that found a violated invariant"
        )
        self._recent = RecentHits()
        text = f"Share of prompt tokens found in the prefix cache, of the last {RECENT} requests"
        self._gauge("prefix_cache_hit_rate", text, lambda: self._recent.rate)
        text = "Finished requests by the reason of their end"
        self._finished = self._counters("request_success", text, "finished_reason")
        text = "Requests by the reason why not more of their prompt was cached"
        self._misses = self._counters("prefix_cache_reasons", text, "reason")
        text = "Prompt tokens found in the prefix cache, by where they were"
        self._hits_by_tier = self._counters("prefix_cache_hits_by_tier", text, "tier")
        self._gauge("num_requests_running", "Sequences that run", lambda: engine.num_running)
        self._gauge("num_requests_waiting", "Sequences that wait", lambda: engine.num_waiting)
        self._gauge("request_memory_bytes", "What requests hold", lambda: memory.held)
        if free_bytes() is not None:
            text = "Memory of the process that its C library has free for later"
            self._gauge("allocator_free_bytes", text, lambda: free_bytes() or 0)
        self.engine_stats = EngineStats(model_name)
        self._registry.register(self.engine_stats)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(
            PREFIX + name, text, ("model_name",), registry=self._registry, buckets=buckets
        )
        return metric.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(PREFIX + name, text, ("model_name",), registry=self._registry)
        return metric.labels(self._model_name)

    def _counters(self, name: str, text: str, label: str) -> Counter:
        """Return counters, one for each value of `label`."""
        return Counter(PREFIX + name, text, ("model_name", label), registry=self._registry)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        metric = Gauge(PREFIX + name, text, ("model_name",), registry=self._registry)
        metric.labels(self._model_name).set_function(read)

    def finished(self, finished: FinishedRequest) -> None:
        """Count a finished request."""
        usage, report = finished.usage, finished.cache_report
        first = finished.seconds_to_first_token
        self.e2e_request_latency.observe(finished.seconds)
        if first is not None:
            self.time_to_first_token.observe(first)
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.generation_tokens.inc(usage.completion_tokens)
        self.prefix_cache_queries.inc(usage.prompt_tokens)
        self.prefix_cache_hits.inc(usage.cached_tokens)
        self._recent.add(usage)
        self._finished.labels(self._model_name, finished.reason).inc()
        if report is not None:
            self._misses.labels(self._model_name, report.reason).inc()
            media = report.media_encoded + report.media_skipped
            self.mm_cache_queries.inc(media)
            self.mm_cache_hits.inc(report.media_skipped)
            self.mm_decodes_skipped.inc(max(0, media - report.media_decoded))
            self.media_cut_short.inc(report.media_cut_short)
            for tier, tokens in report.tiers.items():
                self._hits_by_tier.labels(self._model_name, tier).inc(tokens)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry) + generate_latest(self._plain)


class RecentHits:
    """The hit rate of the last `RECENT` requests that have finished."""

    def __init__(self) -> None:
        self._counts = deque[tuple[int, int]]()
        self._prompt = self._cached = 0

    def add(self, usage: Usage) -> None:
        """Add a request, and forget the oldest one beyond `RECENT`."""
        self._counts.append((usage.prompt_tokens, usage.cached_tokens))
        self._prompt += usage.prompt_tokens
        self._cached += usage.cached_tokens
        if len(self._counts) > RECENT:
            prompt, cached = self._counts.popleft()
            self._prompt -= prompt
            self._cached -= cached

    @property
    def rate(self) -> float:
        """Reused tokens per prompt token; 0 before the first request."""
        return _ratio(self._cached, self._prompt)


class PlainNames(Collector):
    """The metrics of a registry, renamed to begin with PLAIN_PREFIX."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            renamed = Metric(_plain(metric.name), metric.documentation, metric.type, metric.unit)
            renamed.samples = [
                sample._replace(name=_plain(sample.name)) for sample in metric.samples
            ]
            yield renamed


def _plain(name: str) -> str:
    return PLAIN_PREFIX + name.removeprefix(PREFIX)


class TokenTimes(Collector):
    """Histogram of the times between two tokens of one choice. It is used on the event loop only,
    so adding takes no lock."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = [0] * (len(_TOKEN_SECONDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Add a time."""
        self._counts[bisect_left(_TOKEN_SECONDS, seconds)] += 1
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        name, text = "inter_token_latency_seconds", "Between two tokens of one choice"
        bounds = (*map(str, _TOKEN_SECONDS), "+Inf")
        counts = dict(zip(bounds, self._counts, strict=True))
        yield _histogram(name, text, self._model_name, counts, self._seconds)


class EngineStats(Collector):
    """Counters and gauges of the engine, as of the last `update`."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._stats: Mapping[str, Any] = {}

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Memory by what keeps it; empty before the first `update`."""
        held: Mapping[str, int] = self._stats.get("held_bytes", {})
        return held

    def update(self, stats: Mapping[str, Any]) -> None:
        """Store a result of `Engine.stats`."""
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        if not self._stats:
            return
        stats, cache, usage = self._stats, self._stats["cache"], self._stats["usage"]
        yield self._counter("num_preemptions", "Preempted sequences", stats["num_preemptions"])
        text = "Requests that ended because what the model computed was no finite number"
        yield self._counter("num_requests_not_a_number", text, stats["num_unsound"])
        yield self._counter("num_steps", "Steps of the engine", stats["num_steps"])
        ahead = stats["steps_ahead"]
        text = "Steps that were queued before the results of the ones before were read"
        yield self._counter("num_steps_ahead", text, ahead["ahead"])
        text = "Steps that were planned sequence by sequence, or waited for results"
        yield self._counter("num_steps_not_extended", text, ahead["refusals"], "reason")
        yield self._step_times(stats["step_times"])
        if stats["drafts"] is not None:
            yield from self._drafts(stats["drafts"])
        for key, text in ADAPTER_COUNTS.items() if stats["adapters"] else ():
            used = {name: counts[key] for name, counts in stats["adapters"].items()}
            yield self._counter(f"lora_{key}", text, used, "adapter")
        for key, text in TENANT_COUNTS.items() if stats["tenants"] else ():
            used = {name: counts[key] for name, counts in stats["tenants"].items()}
            yield self._counter(f"tenant_{key}", text, used, "tenant")
        text = "Sequences that wait until their client has read"
        yield self._gauge("num_requests_unread", text, float(stats["num_unread"]))
        yield from self._counters("replays")
        text = "Sequences that wait until another one has computed their prefix"
        yield self._gauge("num_requests_joined", text, float(stats["num_joined"]))
        for name, text, count in (
            ("joined_requests", "Requests that waited for a prefix", cache["joined_requests"]),
            ("joined_tokens", "Prompt tokens that they waited for", cache["joined_tokens"]),
            ("joined_seconds", "Time that they waited for them", cache["joined_ms"] / 1000),
        ):
            yield self._counter(f"prefix_cache_{name}", text, count)
        evictions = dict.fromkeys(EVICTED_KINDS, 0) | cache["evictions"]
        yield self._counter("state_snapshots_saved", "Snapshots published", cache["saves"])
        yield self._counter("state_snapshots_skipped", "Snapshots without a row", cache["skips"])
        yield self._counter("cache_evictions", "What was evicted", evictions)
        filled = usage["blocks"] - usage["free_blocks"]
        in_use = _ratio(filled - usage["cached_blocks"], usage["blocks"])
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 is all", in_use)
        text = "KV blocks that hold anything"
        yield self._gauge("kv_cache_fill_perc", text, _ratio(filled, usage["blocks"]))
        yield self._gauge("state_rows", "State rows by what they hold", usage["rows"], "state")
        yield self._gauge("held_bytes", "Memory by what keeps it", stats["held_bytes"], "kind")
        text = "Spans of media by where their embeddings came from"
        sources = dict.fromkeys(("device", "encoded"), 0) | stats["embeddings"]
        yield self._counter("vision_embeddings", text, sources, "source")
        text = "Media by what was known of them, or had to be done"
        sources = dict.fromkeys(("index", "frames", "decoded", "unconfirmed"), 0) | stats["uploads"]
        yield self._counter("media_uploads", text, sources, "source")
        text = "Frames of video files: shown, of these known before, and decoded for the others"
        yield self._counter("video_frames", text, stats["video_frames"])
        text = "Parts of texts, and beginnings of prompts, that were known (hits) or not (misses)"
        found = dict.fromkeys(KNOWN_TEXT, 0) | stats["known_text"]
        yield self._counter("known_text", text, found, "event")
        yield from self._tiers(stats["tiers"])
        yield from self._counters("audit")

    def _tiers(self, tiers: Mapping[str, Any]) -> Iterator[Metric]:
        """Yield which lower tiers are up, and what the shared store has done, if there are any."""
        text = "Lower cache tiers: 1 is used, 0 does not answer and is tried again"
        up = {name.removesuffix("_up"): tiers[name] for name in tiers if name.endswith("_up")}
        if up:
            yield self._gauge("cache_tier_up", text, up, "tier")
        if "shared_hits" not in tiers:
            return
        entries = {name: tiers[f"shared_{name}"] for name in SHARED_EVENTS}
        entries |= {
            "failed": tiers["counts"].get("failed_shared", 0),
            "unshared": tiers["counts"].get("unshared", 0),
        }
        yield self._counter("shared_store_events", "What the shared store has seen", entries)
        sizes = {"read": tiers["shared_read_bytes"], "written": tiers["shared_written_bytes"]}
        yield self._counter("shared_store_bytes", "Payload moved", sizes)

    def _drafts(self, drafts: Mapping[str, Any]) -> Iterator[Metric]:
        yield from self._counters("drafts")
        name = "spec_decode_num_accepted_tokens_per_pos"
        text = "Drafted tokens that held, by their place in the slice"
        places = {str(place): held for place, held in enumerate(drafts["accepted_per_position"])}
        yield self._counter(name, text, places, "position")
        tokens = drafts["drafts"] + drafts["accepted_tokens"]
        text = "Tokens that a verified slice gave, on average"
        length = _ratio(tokens, drafts["drafts"])
        yield self._gauge("spec_decode_mean_accepted_length", text, length)

    def _step_times(self, times: Mapping[str, Any]) -> Metric:
        name, text = "step_host_seconds", "A step's time outside of the model's forward"
        counts, seconds = times["host_seconds_counts"], times["host_seconds"]
        return _histogram(name, text, self._model_name, counts, seconds)

    def _counters(self, part: str) -> Iterator[Metric]:
        """Yield the counters of one part of the statistics."""
        for name, text, key in COUNTERS[part]:
            yield self._counter(name, text, self._stats[part][key])

    def _counter(self, name: str, text: str, counts: Values, label: str = "kind") -> Metric:
        return self._filled(CounterMetricFamily, name, text, counts, label)

    def _gauge(self, name: str, text: str, values: Values, label: str = "") -> Metric:
        return self._filled(GaugeMetricFamily, name, text, values, label)

    def _filled(self, kind: FamilyType, name: str, text: str, values: Values, label: str) -> Metric:
        """Return a family with one value, or with one for each value of `label`."""
        if not isinstance(values, Mapping):
            family = kind(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model_name], values)
            return family
        family = kind(PREFIX + name, text, labels=["model_name", label])
        for entry, value in values.items():
            family.add_metric([self._model_name, entry], value)
        return family


def _histogram(
    name: str, text: str, model_name: str, counts: Mapping[str, int], total: float
) -> Metric:
    """Return a histogram, from how many values are in each bucket and the sum of all values."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
    family.add_metric([model_name], [*zip(counts, accumulate(counts.values()), strict=True)], total)
    return family


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished request. Times are monotonic seconds.

    Attributes:
        request_id: id in responses and logs.
        trace: headers of the trace that the request continues.
        choices: answers that the request asked for.
        usage, cache_report: as of the last delta.
        stages: seconds of its preparation by stage.
        arrival: time at which the request came in.
        submitted: time at which the engine got it.
        first_token: time of the first token; None: there was none.
        ended: time at which it ended.
        reason: finish reason of the last choice, "abort" or "error".
    """

    request_id: str
    trace: Mapping[str, str]
    choices: int
    usage: Usage
    cache_report: CacheReport | None
    stages: Mapping[str, float]
    arrival: float
    submitted: float
    first_token: float | None
    ended: float
    reason: str

    @property
    def seconds(self) -> float:
        """Seconds from arrival to the end."""
        return self.ended - self.arrival

    @property
    def seconds_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token; None: there was none."""
        return None if self.first_token is None else self.first_token - self.arrival

    def log(self) -> None:
        """Write the request's line of the access log."""
        first, usage, report = self.seconds_to_first_token, self.usage, self.cache_report
        _access.info(
            "request_id=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d prepare_ms=%.1f "
            "stages_ms=%s ttft_ms=%s "
            "total_ms=%.1f finish_reason=%s cache_reason=%s",
            self.request_id,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            (self.submitted - self.arrival) * 1000,
            ",".join(f"{name}:{1000 * value:.1f}" for name, value in self.stages.items()),
            f"{first * 1000:.1f}" if first is not None else "-",
            self.seconds * 1000,
            self.reason,
            report.reason if report is not None else "-",
        )
