"""OpenTelemetry traces: one span for each request. Imported only if traces are on."""

from __future__ import annotations

import time

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vlm_serve.server.metrics import FinishedRequest


class RequestTracer:
    """Makes a span of every finished request.

    Args:
        processor: receives the spans.
        model: name of the model, for the spans' attributes.
    """

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "vlm-serve"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("vlm_serve")
        self._model = model

    @classmethod
    def to_endpoint(cls, endpoint: str, model: str) -> RequestTracer:
        """Make a tracer that exports batches of spans over OTLP/HTTP, on its own thread."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model)

    def record(self, finished: FinishedRequest) -> None:
        """Make the span of a request, with wall-clock times for its monotonic ones."""
        usage, report = finished.usage, finished.cache_report
        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(finished.trace),
            kind=SpanKind.SERVER,
            start_time=end - round((time.monotonic() - finished.arrival) * 1e9),
            attributes={
                "gen_ai.request.id": finished.request_id,
                "gen_ai.response.model": self._model,
                "gen_ai.request.n": finished.choices,
                "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
                "gen_ai.usage.completion_tokens": usage.completion_tokens,
                "gen_ai.usage.cached_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reason": finished.reason,
                "gen_ai.latency.e2e": finished.seconds,
            },
        )
        first = finished.seconds_to_first_token
        if first is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", first)
        if report is not None:
            span.set_attribute("vlm_serve.cache_reason", report.reason)
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()
