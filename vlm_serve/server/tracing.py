"""OpenTelemetry traces: one span per request. Imported only if they are switched on."""

from __future__ import annotations

import time

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vlm_serve.server.answers.generation import Generation


class RequestTracer:
    """Makes a span of every request that has ended.

    Args:
        processor: where the spans go.
        model: its name, for the span's attributes.
    """

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "vlm-serve"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("vlm_serve")
        self._model = model

    @classmethod
    def to_endpoint(cls, endpoint: str, model: str) -> RequestTracer:
        """Sends the spans in batches, on a thread of their own, to an OTLP/HTTP endpoint."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model)

    def record(self, generation: Generation, reason: str) -> None:
        """Times are monotonic until here; spans want the clock on the wall."""
        task, usage, report = generation.task, generation.usage, generation.cache_report
        end, now = time.time_ns(), time.monotonic()
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(task.trace),
            kind=SpanKind.SERVER,
            start_time=end - round((now - task.arrival) * 1e9),
            attributes={
                "gen_ai.request.id": task.request_id,
                "gen_ai.response.model": self._model,
                "gen_ai.request.n": task.params.n,
                "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
                "gen_ai.usage.completion_tokens": usage.completion_tokens,
                "gen_ai.usage.cached_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reason": reason,
                "gen_ai.latency.e2e": now - task.arrival,
            },
        )
        first = generation.first_token_time
        if first is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", first - task.arrival)
        if report is not None:
            span.set_attribute("vlm_serve.cache_reason", report.reason)
        span.end(end)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()
