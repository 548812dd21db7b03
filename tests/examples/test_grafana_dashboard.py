"""The dashboard charts what /metrics has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from make_checkpoint import make_checkpoint
from prometheus_client.parser import text_string_to_metric_families

from vlm_serve.engine.requests.outputs import CacheReport, Usage
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.http.request_memory import RequestMemory
from vlm_serve.server.metrics import FinishedRequest, Metrics

DASHBOARD = Path(__file__).resolve().parents[2] / "examples" / "grafana_dashboard.json"


def test_every_metric_of_the_dashboard_exists(tmp_path: Path) -> None:
    engine: Any = FakeEngine(Tokenizer(make_checkpoint(tmp_path / "checkpoint")))
    try:
        metrics = Metrics("test-model", engine, RequestMemory(1))
        metrics.finished(
            FinishedRequest(
                request_id="request",
                trace={},
                choices=1,
                usage=Usage(3, 2, 1),
                cache_report=CacheReport(3, 1, 1, 1, tiers={"host": 1}),
                stages={},
                arrival=0.0,
                submitted=0.1,
                first_token=0.2,
                ended=0.3,
                reason="stop",
            )
        )
        metrics.engine_stats.update(engine.stats())
        families = text_string_to_metric_families(metrics.render().decode())
        known = {sample.name for family in families for sample in family.samples}
    finally:
        engine.close()
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    for panel in panels:
        for target in panel["targets"]:
            charted = re.findall(r"vlm_serve:\w+", target["expr"])
            assert charted, panel["title"]
            assert set(charted) <= known, panel["title"]
