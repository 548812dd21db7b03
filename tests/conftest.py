"""Settings that must be in place before any test module is imported."""

from __future__ import annotations

import os
import signal

# Triton decides at its first import whether kernels run in the interpreter, and transformers
# imports it too. TRITON_INTERPRET=0 in the environment runs the kernels' tests on a GPU instead.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests run beside each other: threads that spin at a barrier keep the one that they wait for from
# its core. libgomp reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from selection import Selection
from surviving_workers import pytest_xdist_make_scheduler
from timekeeper import Timekeeper

# pytest takes hooks by their names in this module.
__all__ = ["pytest_xdist_make_scheduler"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-minutes",
        type=float,
        default=float("inf"),
        help="skip tests with a slow mark from this many minutes on, and name their files",
    )
    parser.addoption(
        "--part", default="", help="which of several parts of the slow tests runs, as in 2/3"
    )
    parser.addoption(
        "--backwards", action="store_true", help="begin with the files that otherwise come last"
    )
    parser.addoption(
        "--write-costs", action="store_true", help="write into costs.json what tests cost"
    )


# Tests run beside each other and on machines of any speed: no example is held to a time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


class _Failures:
    """Names each failure at once: a run that is ended early prints no list of them."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.partition("\n")[0] if crash else report.when
            print(f"\nFAILED {report.nodeid}: {message[:300]}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    # nohup and shells in the background leave them ignored: servers of tests would inherit that.
    for each in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)
    config.pluginmanager.register(Selection(config))
    config.pluginmanager.register(Timekeeper(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures())


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: in tiny models a second one costs more in waiting than it saves, and
    other workers have the other cores. Results do not depend on it, which tests of kernels show."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compiler() -> None:
    """For tests of compiled code; where it cannot be had they say why they are skipped. A busy
    machine is no reason, so compiling may take longer than it does when serving."""
    from compiled_code import wait_for_compiled_code

    wait_for_compiled_code()
