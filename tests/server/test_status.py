"""Models, version, load, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from serving import RunningServer, chat_body, wait_for

from vlm_serve.engine.requests.outputs import Delta, Usage
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.metrics import RECENT, RecentHits
from vlm_serve.server.routes import DescribedApp


def test_models(fake: RunningServer) -> None:
    body = fake.client.get("/v1/models").json()
    assert body["object"] == "list"
    (card,) = body["data"]
    assert card["id"] == "test-model"
    assert card["max_model_len"] == 4096
    assert fake.client.get("/v1/models/test-model").json() == card


def test_version_and_load(fake: RunningServer) -> None:
    assert fake.client.get("/version").json()["version"]
    assert fake.client.get("/load").json() == {
        "server_load": 0,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "open_prompt_tokens": 0,
        "request_memory_bytes": 0,
    }


def samples(server: RunningServer) -> dict[str, float]:
    text = server.client.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("vlm_serve:"):
                continue
            assert sample.labels["model_name"] == "test-model"
            labels = [v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "le")]
            if "le" not in sample.labels:
                found[" ".join([sample.name.removeprefix("vlm_serve:"), *labels])] = sample.value
    return found


def test_metrics_tell_what_steps_cost_outside_the_model(fake: RunningServer) -> None:
    before = samples(fake)
    fake.engine.step_times.record(0.075, 0.070)
    fake.engine.step_times.record(0.9, 0.2)
    after = samples(fake)
    grown = {
        name: value - before[name] for name, value in after.items() if name.startswith("step_host")
    }
    assert grown["step_host_seconds_count"] == 2
    assert grown["step_host_seconds_sum"] == pytest.approx(0.705)


def test_metrics_count_what_happened(fake: RunningServer) -> None:
    before = samples(fake)
    usage = fake.chat().json()["usage"]
    after = samples(fake)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("generation_tokens_total") == usage["completion_tokens"]
    assert grown("prefix_cache_queries_total") == usage["prompt_tokens"]
    assert grown("prefix_cache_hits_total") == 3
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("e2e_request_latency_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == usage["completion_tokens"] - 1
    assert grown("request_success_total stop") == 1
    assert grown("prefix_cache_reasons_total cold") == 1
    assert grown("prefix_cache_hits_by_tier_total device") == 2
    assert grown("prefix_cache_hits_by_tier_total host") == 1
    assert grown("mm_cache_queries_total") == grown("mm_cache_hits_total") == 1
    assert grown("mm_decodes_skipped_total") == 1
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0


def test_the_hit_rate_is_that_of_recent_requests(fake: RunningServer) -> None:
    usage = fake.chat().json()["usage"]
    assert 0 < samples(fake)["prefix_cache_hit_rate"] < 1
    recent = RecentHits()
    assert recent.rate == 0
    recent.add(Usage(prompt_tokens=30, cached_tokens=30))
    for _ in range(RECENT - 1):
        recent.add(Usage(prompt_tokens=10))
    assert recent.rate == 30 / (30 + 10 * (RECENT - 1))
    recent.add(Usage(prompt_tokens=usage["prompt_tokens"]))
    assert recent.rate == 0


def test_metrics_know_adapters(fake: RunningServer) -> None:
    found = samples(fake)
    names = ("requests", "cached_tokens", "draft_tokens", "accepted_tokens")
    assert [found[f"lora_{name}_total tuned"] for name in names] == [2, 20, 6, 4]


def test_tokens_that_nobody_waits_for_count_from_when_they_were_made(
    fake: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = fake.engine.submit

    def later_and_later(
        prompt: Prompt, params: SamplingParams, on_delta: Callable[[Delta], None], **options: Any
    ) -> str:
        times = itertools.count(time.monotonic(), 5.0)
        result: str = submit(
            prompt, params, lambda delta: on_delta(replace(delta, time=next(times))), **options
        )
        return result

    def seconds() -> float:
        return samples(fake)["inter_token_latency_seconds_sum"]

    monkeypatch.setattr(fake.engine, "submit", later_and_later)
    before = seconds()
    tokens = fake.chat().json()["usage"]["completion_tokens"]
    assert seconds() - before == pytest.approx(5.0 * (tokens - 1))
    before = seconds()
    fake.stream("/v1/chat/completions", chat_body("hi"))
    assert seconds() - before < 5.0


def test_metrics_of_the_engine(fake: RunningServer) -> None:
    found = samples(fake)
    assert found["num_preemptions_total"] == 2
    assert found["kv_cache_usage_perc"] == 0.5
    assert found["kv_cache_fill_perc"] == 0.6
    assert found["state_rows free"] == 7
    assert found["state_snapshots_saved_total media"] == 3
    assert found["cache_evictions_total kv"] == 1
    assert (found["held_bytes kv"], found["held_bytes grammars"]) == (6, 0)
    assert 0 <= found["held_bytes responses"] <= 64 << 20
    assert found["num_requests_joined"] == 3
    joined = [found[f"prefix_cache_joined_{name}_total"] for name in ("requests", "tokens")]
    assert joined == [4, 640] and found["prefix_cache_joined_seconds_total"] == 0.25
    names = ("audits", "mismatches", "near_ties", "dropped")
    assert [found[f"cache_audit_{name}_total"] for name in names] == [9, 1, 2, 3]


def test_metrics_tell_which_tiers_are_used(
    fake: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(name.startswith("cache_tier_up") for name in samples(fake))
    stats = fake.engine.stats() | {"tiers": {"counts": {}, "host_up": 1, "disk_up": 0}}
    monkeypatch.setattr(fake.engine, "stats", lambda: stats)
    found = samples(fake)
    assert (found["cache_tier_up host"], found["cache_tier_up disk"]) == (1, 0)


IN_ONE_PROCESS = """
from types import SimpleNamespace
from vlm_serve.server.metrics import Metrics
metrics = Metrics("m", SimpleNamespace(num_running=1, num_waiting=0), SimpleNamespace(held=2))
metrics.prompt_tokens.inc(3)
assert b'vlm_serve:prompt_tokens_total{model_name="m"} 3.0' in metrics.render()
"""


def test_metrics_need_no_folder_of_servers_of_many_processes(tmp_path: Path) -> None:
    for folder in (tmp_path / "none", tmp_path):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", IN_ONE_PROCESS],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_what_was_never_evicted_counts_from_nought(fake: RunningServer) -> None:
    found = samples(fake)
    kinds = ("tail", "snapshot", "suspended", "timed_pin")
    assert [found[f"cache_evictions_total {kind}"] for kind in kinds] == [0, 0, 0, 0]


def test_metrics_of_the_process(fake: RunningServer) -> None:
    lines = fake.client.get("/metrics").text.splitlines()
    found = dict(line.split() for line in lines if line.startswith("process_"))
    assert float(found["process_resident_memory_bytes"]) > 1 << 20
    assert float(found["process_open_fds"]) > 3
    assert float(found["process_cpu_seconds_total"]) > 0


def test_every_metric_has_a_name_without_a_colon_too(fake: RunningServer) -> None:
    """A colon is for recording rules; the names with one are those of vLLM's dashboards."""
    assert fake.chat().status_code == 200
    text = fake.client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    with_colon = [name for name in families if ":" in name]
    assert with_colon
    for name in with_colon:
        plain, family = families[name.replace(":", "_")], families[name]
        assert (plain.type, plain.documentation) == (family.type, family.documentation)
        assert [sample.labels for sample in plain.samples] == [s.labels for s in family.samples]
    for family in families.values():
        assert family.documentation
        if family.type == "counter":
            allowed = {family.name + "_total", family.name + "_created"}
            assert {sample.name for sample in family.samples} <= allowed
    promtool = shutil.which("promtool")
    if promtool is not None:
        plain_text = "".join(
            line for line in text.splitlines(keepends=True) if "vlm_serve:" not in line
        )
        done = subprocess.run(
            [promtool, "check", "metrics"],
            input=plain_text, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_metrics_of_drafts(fake: RunningServer) -> None:
    found = samples(fake)
    assert found["spec_decode_num_drafts_total"] == 4
    assert found["spec_decode_num_draft_tokens_total"] == 12
    assert found["spec_decode_num_accepted_tokens_total"] == 6
    assert found["spec_decode_num_accepted_tokens_per_pos_total 0"] == 4
    assert found["spec_decode_num_accepted_tokens_per_pos_total 1"] == 2
    assert found["spec_decode_mean_accepted_length"] == 2.5
    assert found["replayed_requests_total"] == 2
    assert found["replayed_tokens_total"] == 30
    assert found["replay_disagreements_total"] == 0


def test_metrics_name_how_requests_end(fake: RunningServer) -> None:
    before = samples(fake)
    fake.engine.fail_after = 1
    fake.chat()
    fake.engine.fail_after = None
    fake.chat(max_tokens=1)
    after = samples(fake)
    for reason in ("error", "length"):
        name = f"request_success_total {reason}"
        assert after[name] == before.get(name, 0.0) + 1


def test_the_access_log_has_one_line_per_request(
    fake: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vlm_serve.access"):
        request_id = fake.chat().headers["x-request-id"]
        wait_for(lambda: f"request_id={request_id}" in caplog.text)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "vlm_serve.access"]
    fields = dict(part.split("=") for part in line.split())
    assert fields["cached_tokens"] == "3"
    assert fields["finish_reason"] == "stop"
    assert fields["cache_reason"] == "cold"
    prepare, first, total = (float(fields[name]) for name in ("prepare_ms", "ttft_ms", "total_ms"))
    assert prepare <= first <= total
    stages = dict(stage.split(":") for stage in fields["stages_ms"].split(","))
    assert float(stages["render"]) <= prepare


def test_the_openapi_document_is_closed(fake: RunningServer) -> None:
    document = fake.client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"} <= set(
        document["paths"]
    )
    schemas = document["components"]["schemas"]
    names = set()

    def collect(value: object) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                names.add(value["$ref"].removeprefix("#/components/schemas/"))
            for each in value.values():
                collect(each)
        elif isinstance(value, list):
            for each in value:
                collect(each)

    collect(document)
    assert names <= set(schemas)
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]


def test_routes_that_documents_name_are_in_the_openapi_document(fake: RunningServer) -> None:
    paths = fake.client.get("/openapi.json").json()["paths"]
    known = {re.sub(r"\{\w+\}", "{}", path) for path in paths}
    root = Path(__file__).resolve().parents[2]
    seen = set()
    for document in (root / "README.md", *(root / "docs").glob("*.md")):
        text = document.read_text(encoding="utf-8")
        for path in re.findall(r"`(?:[A-Z]+ )?(/v1/[\w/{}]+)", text):
            route = re.sub(r"\{\w+\}|KEY", "{}", path)
            seen.add(route)
            assert route in known or route + "/{}" in known, f"{document.name}: {path}"
    assert len(seen) > 10


def test_the_openapi_document_is_made_once_and_off_the_event_loop() -> None:
    """It takes a tenth of a second, in which nobody else would be answered."""
    made: list[str] = []

    class Watched(DescribedApp):
        def openapi(self) -> dict[str, str]:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            made.append("made")
            return {"openapi": "3"}

    client = TestClient(Watched(title="vlm-serve", version="1"))
    assert [client.get("/openapi.json").json() for _ in range(3)] == [{"openapi": "3"}] * 3
    assert made == ["made"]


def test_the_openapi_document_knows_what_streams(fake: RunningServer) -> None:
    paths = fake.client.get("/openapi.json").json()["paths"]
    posts = {path: each["post"] for path, each in paths.items() if "post" in each}
    answers = {path: post["responses"]["200"]["content"] for path, post in posts.items()}
    streams = {path for path, content in answers.items() if "text/event-stream" in content}
    assert all("application/json" in content for content in answers.values())
    assert streams == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/inference/v1/generate",
    }
    events = paths["/v1/cache/events"]["get"]["responses"]["200"]["content"]
    assert "text/event-stream" in events


@pytest.mark.parametrize(
    "path",
    ["/health", "/ready", "/load", "/version", "/metrics", "/v1/models", "/v1/models/test-model",
     "/v1/models/other", "/v1/cache/stats", "/openapi.json"],
)  # fmt: skip
def test_head_is_get_without_a_body(fake: RunningServer, path: str) -> None:
    got, head = fake.client.get(path), fake.client.head(path)
    assert head.status_code == got.status_code
    assert head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    assert fake.client.get(path).status_code == got.status_code


def test_head_does_not_reach_what_is_only_posted(fake: RunningServer) -> None:
    assert fake.client.head("/v1/chat/completions").status_code == 405
