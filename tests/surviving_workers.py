"""Distribution of test files to workers, in which a worker's death costs the test that it ran.

xdist's own scheduler hands the test that ended a worker to the replacement again, so one such test
ends worker after worker. It also gives work to a replacement that has not collected its tests yet,
which ends the whole run with a KeyError.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

DEATHS_WHILE_COLLECTING = 4
"""Deaths without a test that end the run: what ends a worker then will end each replacement."""
_ENOUGH = 2
"""Tests that a worker must have waiting: it begins a test only when it knows the next one."""


class SurvivingWorkers(LoadFileScheduling):
    """Gives each worker whole files; the rest of a dead worker's files goes to other workers."""

    _deaths_while_collecting = 0

    def remove_node(self, node: WorkerController) -> str | None:
        """Forget a worker, and return the test that it was running; None if it had none to run.

        Raises:
            pytest.exit.Exception: workers die while they collect the tests.
        """
        if node not in self.registered_collections and not node._shutdown_sent:
            self._deaths_while_collecting += 1
            if self._deaths_while_collecting >= DEATHS_WHILE_COLLECTING:
                pytest.exit("workers die while they collect the tests", returncode=3)
        files = self.assigned_work.pop(node)
        ended_by: str | None = next(
            (test for tests in files.values() for test, done in tests.items() if not done), None
        )
        if ended_by is None:
            return None
        files[self._split_scope(ended_by)][ended_by] = True
        self.workqueue.update(
            (file, tests) for file, tests in files.items() if not all(tests.values())
        )
        for other in self.nodes:
            self._reschedule(other)
        return ended_by

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker files until it has enough to do, or tell it that no more will come."""
        if node.shutting_down or node not in self.registered_collections:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= _ENOUGH:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SurvivingWorkers | None:
    """Choose the scheduler of `--dist loadfile`; other modes keep xdist's."""
    return SurvivingWorkers(config, log) if config.option.dist == "loadfile" else None
