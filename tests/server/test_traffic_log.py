"""While there is traffic, the log has a line every ten seconds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from serving import ok, running, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server import cache_feed, traffic_log
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.traffic_log import TrafficLog

NAME = "vlm_serve.server.traffic_log"
ROWS = {"live": 1, "ready": 7}


def status(requests: int = 0, *, steps: int = 0, running: int = 0) -> dict[str, Any]:
    return {
        "requests": requests,
        "prompt_tokens": 1000 * requests,
        "hit_tokens": 800 * requests,
        "generated_tokens": 30 * requests,
        "steps": steps,
        "running": running,
        "waiting": 0,
        "usage": {"blocks": 64, "free_blocks": 40, "rows": ROWS},
    }


def test_a_line_every_ten_seconds_with_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, NAME)
    now = [0.0]
    log = TrafficLog(lambda: now[0])

    def note(seconds: float, *given: Any, **more: Any) -> list[str]:
        now[0] += seconds
        caplog.clear()
        log.note(status(*given, **more))
        return [record.message for record in caplog.records]

    assert note(500) == [], "nothing has been done"
    assert note(5, 2, running=1) == []
    (line,) = note(5, 3, running=1)
    assert line.startswith("10 s: 3 requests began with 3000 prompt tokens, hit rate 80.0%; 90 tok")
    assert line.endswith("1 running, 0 waiting; blocks 24 of 64, state rows 1 live, 7 snapshots")
    assert note(5, 4) == []
    (line,) = note(5, 4)
    assert line.startswith("10 s: 1 requests"), "the rest of it is told, too"
    assert note(5, 4) == note(5, 4) == note(3600, 4) == []
    assert note(5, 5) == []
    (line,) = note(5, 5)
    assert line.startswith("10 s: 1 requests"), "the pause does not count"
    assert note(5, 5, steps=1, running=1) == []
    (line,) = note(5, 5, steps=2, running=1)
    assert "0 prompt tokens, hit rate none; 0 tokens" in line, "a long prompt"
    assert note(50, 5, steps=2, running=1) == [], "a stalled engine does no work"


def test_a_server_writes_them(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, NAME)
    monkeypatch.setattr(cache_feed, "HISTORY_SECONDS", 0.05)
    monkeypatch.setattr(traffic_log, "SECONDS", 0.1)
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="32MiB", max_model_len=2048)
    with running(Engine.from_checkpoint(str(checkpoint), config), ServerConfig(port=0)) as server:
        for _ in range(2):
            ok(server.chat("Where does the small red house stand? " * 10, max_tokens=2))

        def told() -> str:
            return " ".join(record.message for record in caplog.records if record.name == NAME)

        wait_for(lambda: "requests began" in told() and "snapshots" in told())
