"""The memory plan of public model shapes, from their configs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlm_serve.cli import main

DATA = Path(__file__).parent / "data"
LARGE = ["--cache-memory", "8485MiB", "--kv-dtype", "int8", "--state-dtype", "bfloat16"]
LARGE += ["--block-size", "64", "--tp", "2"]


def _plan(capsys: pytest.CaptureFixture[str], config: str, *flags: str) -> dict[str, Any]:
    assert main(["plan", "--model", str(DATA / config), "--json", *flags]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


@pytest.mark.parametrize(("interval", "tokens"), [(2, 27_200), (64, 337_600), (128, 413_952)])
def test_tokens_of_the_27b_on_two_ranks(
    capsys: pytest.CaptureFixture[str], interval: int, tokens: int
) -> None:
    plan = _plan(capsys, "qwen3.5-27b.json", *LARGE, "--state-interval", str(interval))
    assert plan["block_bytes"] == 1_064_960
    assert plan["snapshot_bytes"] == pytest.approx(37.4 * 2**20, rel=0.002)
    assert plan["tokens"] == pytest.approx(tokens, rel=0.02)
    rows = {row["interval"]: row for row in plan["table"]}
    assert rows[interval]["tokens"] == plan["tokens"]
    assert rows[interval]["snapshots"] == plan["snapshots"]
    assert plan["granularity"] == 64


def test_a_snapshot_of_the_4b_to_the_byte(capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(capsys, "qwen3.5-4b.json", "--cache-memory", "4GiB", "--max-num-seqs", "3")
    assert plan["snapshot_bytes"] == 51_511_296
    assert plan["live_state_bytes"] == 3 * 51_511_296


def test_the_plan_never_spends_more_than_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(capsys, "qwen3.5-35b-a3b.json", "--cache-memory", "3GiB")
    blocks = plan["tokens"] // plan["granularity"]
    spent = blocks * plan["block_bytes"] + plan["snapshots"] * plan["snapshot_bytes"]
    assert 0.97 * 3 * 2**30 < spent <= 3 * 2**30
    for row in plan["table"]:
        blocks = row["tokens"] // plan["granularity"]
        assert blocks * plan["block_bytes"] + row["snapshots"] * plan["snapshot_bytes"] <= 3 << 30


def test_the_text_names_every_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(DATA / "qwen3.5-35b-a3b.json")]) == 0
    text = capsys.readouterr().out
    for bucket in ("KV blocks", "snapshots", "live state rows", "vision embeddings", "expert rows"):
        assert bucket in text


def test_an_impossible_plan_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(DATA / "qwen3.5-4b.json")
    assert main(["plan", "--model", model, "--cache-memory", "1MiB"]) == 2
    assert "raise cache_memory to at least" in capsys.readouterr().err
    assert main(["plan", "--model", model, "--tp", "3"]) == 2
    assert "tp" in capsys.readouterr().err
    assert main(["plan", "--model", str(DATA / "missing.json")]) == 1
    assert "config" in capsys.readouterr().err
