"""Spans of requests."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from fake_engine import FakeEngine
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving import RunningServer, chat_body, running, wait_for

from vlm_serve.errors import ConfigError
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.tracing import RequestTracer


def test_a_span_tells_about_its_request(fake: RunningServer) -> None:
    exporter = InMemorySpanExporter()
    fake.service.state.tracer = RequestTracer(SimpleSpanProcessor(exporter), "test-model")
    try:
        answer = fake.chat("hi", request_id="my-request")
        usage = answer.json()["usage"]
        fake.engine.fail_after = 0
        assert fake.chat("hi").status_code == 500
        wait_for(lambda: len(exporter.get_finished_spans()) == 2)
    finally:
        fake.service.state.tracer = None
    good, bad = exporter.get_finished_spans()
    found = dict(good.attributes or {})
    assert good.name == "llm_request"
    assert found["gen_ai.request.id"] == "my-request"
    assert found["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert found["gen_ai.usage.cached_tokens"] == 3
    assert found["gen_ai.response.finish_reason"] == "stop"
    assert found["vlm_serve.cache_reason"] == "cold"
    first, total = (found[f"gen_ai.latency.{name}"] for name in ("time_to_first_token", "e2e"))
    assert isinstance(first, float)
    assert isinstance(total, float)
    assert 0 < first <= total
    assert good.start_time is not None
    assert good.end_time is not None
    assert abs((good.end_time - good.start_time) / 1e9 - total) < 0.01
    attributes = dict(bad.attributes or {})
    assert attributes["gen_ai.response.finish_reason"] == "error"
    assert "gen_ai.latency.time_to_first_token" not in attributes


@pytest.mark.parametrize(
    "url",
    [
        "collector:4318",
        "nonsense",
        "",
        "ftp://x",
        "http://",
        "http://[::1",
        "http://x:y",
        "https:x",
    ],
)
def test_an_endpoint_is_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match="^otlp_traces_endpoint must be a URL such as http://"):
        ServerConfig(otlp_traces_endpoint=url)


def test_a_collector_need_not_be_there(tokenizer: Tokenizer) -> None:
    for url in ("http://127.0.0.1:1/v1/traces", "https://no-such-machine.invalid:4318"):
        config = ServerConfig(port=0, otlp_traces_endpoint=url)
        with running(FakeEngine(tokenizer), config) as server:
            assert server.client.get("/health").status_code == 200


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat_body()),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", chat_body(max_tokens=5)),
    ],
)
def test_the_callers_trace_goes_on(fake: RunningServer, path: str, body: dict[str, Any]) -> None:
    exporter = InMemorySpanExporter()
    fake.service.state.tracer = RequestTracer(SimpleSpanProcessor(exporter), "test-model")
    try:
        for given in (f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", "00-nonsense", None):
            headers = {} if given is None else {"traceparent": given, "tracestate": "a=b"}
            assert fake.post(path, body, headers=headers).status_code == 200
        wait_for(lambda: len(exporter.get_finished_spans()) == 3)
    finally:
        fake.service.state.tracer = None
    followed, *others = exporter.get_finished_spans()  # who does not sample wants no span of ours
    assert followed.context is not None
    assert followed.parent is not None
    assert f"{followed.context.trace_id:032x}" == TRACE
    assert f"{followed.parent.span_id:016x}" == PARENT
    assert followed.context.trace_state.get("a") == "b"
    assert all(span.parent is None for span in others)


def test_nothing_is_imported_when_traces_are_off() -> None:
    code = (
        "import sys, vlm_serve.server.main; "
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
