"""What Ray's processes write, in the gateway's log."""

from __future__ import annotations

import logging

import pytest

from vlm_serve.deploy.cluster import RayLog

NEEDLESS = (
    "ERROR 2026-01-02 03:04:05,678 controller 9 -- Exception when trying to get routing stats:",
    "Traceback (most recent call last):",
    '  File "deployment_state.py", line 1848, in get_routing_stats',
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
)
CRASHED = "WARNING 2026-01-02 03:04:06,789 controller 9 -- Actor for Replica crashed."
FAILED = (
    "ERROR 2026-01-02 03:04:07,890 controller 9 -- Exception in Replica, it will be stopped.",
    "RuntimeError: the model has no weights",
)
OURS = "2026-01-02 03:04:05,678 INFO vlm_serve.engine: ready"


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_dead_replicas_traceback_is_left_out_and_all_else_is_said(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever a batch of lines ends, and whatever others write meanwhile."""
    log = RayLog()
    lines = [*NEEDLESS, CRASHED, *NEEDLESS, *FAILED]
    with caplog.at_level(logging.DEBUG):
        for first in range(0, len(lines), size):
            log.receive(
                {"pid": 9, "actor_name": "Controller", "lines": lines[first : first + size]}
            )
            log.receive({"pid": 7, "actor_name": "Replica", "lines": [OURS]})
    said = [each for each in caplog.records if "pid=9" in each.getMessage()]
    assert [each.getMessage() for each in said] == [
        f"(Controller pid=9) {line}" for line in (CRASHED, *FAILED)
    ]
    assert [each.levelno for each in said] == [logging.WARNING, logging.ERROR, logging.ERROR]
    others = [each for each in caplog.records if "pid=7" in each.getMessage()]
    assert len(others) == -(-len(lines) // size)
    assert {each.levelno for each in others} == {logging.INFO}


def test_what_is_no_record_is_said(caplog: pytest.LogCaptureFixture) -> None:
    RayLog().receive({"pid": 3, "lines": ["terminate called"]})
    assert [each.getMessage() for each in caplog.records] == ["(worker pid=3) terminate called"]
