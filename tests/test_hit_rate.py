"""Workloads for places of snapshots (benchmarks/hit_rate.py --places)."""

from __future__ import annotations

import pytest

from benchmarks.common.reuse_runs import Run, make_prompt, reusable
from benchmarks.common.reuse_workloads import WORKLOADS, Asked, digest, workload
from vlm_serve.preprocess.identity.prompt import Prompt

DIGESTS = {
    "chats": "04c6382a405e1319",
    "agents": "3ef6570ef535e12e",
    "documents with questions": "f5db9b4e060319ad",
    "growing video": "8da07db9d28d1008",
    "few-shot evaluation": "14140b3700406322",
}
"""Written down before the policy. They are never tuned to it."""


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_what_it_was_before_the_policy(name: str) -> None:
    assert digest(workload(name))[:16] == DIGESTS[name]


def prepared(name: str, count: int) -> tuple[list[Asked], list[Prompt]]:
    asked = workload(name)[:count]
    return asked, [make_prompt(one) for one in asked]


def test_a_run_reuses_what_rows_allow() -> None:
    asked, prompts = prepared("few-shot evaluation", 60)
    ample, none = (Run(asked, prompts, rows).run() for rows in (256, 0))
    assert ample.prompt == sum(map(len, prompts))
    assert none.cached < ample.cached <= reusable(asked, prompts) < ample.prompt
    assert none.evictions and not ample.evictions


@pytest.mark.parametrize("rows", [64, 256])
def test_places_off_the_interval_are_learned(rows: int) -> None:
    """Questions follow documents in one message: prompts part without a mark or interval there."""
    asked, prompts = prepared("documents with questions", 130)
    fixed = Run(asked, prompts, rows, learned=False).run()
    learned = Run(asked, prompts, rows).run()
    assert learned.saves["learned"] and not fixed.saves["learned"]
    possible = reusable(asked, prompts)
    assert fixed.cached < learned.cached <= possible
    if rows == 256:
        assert 2 * (possible - learned.cached) < possible - fixed.cached
