"""Settings that must be in place before any test module is imported."""

from __future__ import annotations

import datetime
import os
import signal

# Triton decides at its first import whether kernels run in the interpreter, and transformers
# imports it too. TRITON_INTERPRET=0 in the environment runs the kernels' tests on a GPU instead.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests run beside each other: threads that spin at a barrier keep the one that they wait for from
# its core. libgomp reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import time
from collections.abc import Iterator

import pytest
from surviving_workers import pytest_xdist_make_scheduler
from sweeps import MARKS

# pytest takes hooks by their names in this module.
__all__ = ["pytest_xdist_make_scheduler"]

_STRIDE = 17
NO_TIME = "no time was left for slow tests"
_STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-minutes",
        type=float,
        default=float("inf"),
        help="skip tests with a slow mark from this many minutes on, and count them",
    )
    parser.addoption("--slow-turn", type=int, help="where to begin with them; default: by the date")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    late = time.monotonic() - _STARTED > 60 * item.config.getoption("--slow-minutes")
    if late and any(item.get_closest_marker(name) for name in MARKS):
        pytest.skip(NO_TIME)


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
    # Workers get the options of the process that starts them, so midnight does not divide them.
    if config.option.slow_turn is None:
        config.option.slow_turn = datetime.date.today().toordinal()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if late := sum(NO_TIME in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{late} slow tests did not run: {NO_TIME}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with slow tests first: at the end no worker is alone with one of them.

    Where time is limited, another file is the first one every day: so none is always left out.
    """
    if config.option.slow_minutes < float("inf"):
        files = list(dict.fromkeys(item.path for item in items))
        first = config.option.slow_turn * _STRIDE % max(len(files), 1)
        turn = {path: index for index, path in enumerate(files[first:] + files[:first])}
        items.sort(key=lambda item: turn[item.path])
    slow = {item.path for item in items if any(item.get_closest_marker(name) for name in MARKS)}
    items.sort(key=lambda item: item.path not in slow)


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
