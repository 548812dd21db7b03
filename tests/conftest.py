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

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from costs import Costs, Part
from surviving_workers import pytest_xdist_make_scheduler
from sweeps import MARKS
from timekeeper import Timekeeper

# pytest takes hooks by their names in this module.
__all__ = ["pytest_xdist_make_scheduler"]

NO_TIME = "no time was left for slow tests"
_STARTED = time.monotonic()


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    late = time.monotonic() - _STARTED > 60 * item.config.getoption("--slow-minutes")
    if late and is_slow(item):
        pytest.skip(NO_TIME)


def is_slow(item: pytest.Item) -> bool:
    """Tell whether `make test` leaves a test out."""
    return any(item.get_closest_marker(name) for name in MARKS)


def file_of(item: pytest.Item) -> str:
    """Return a test's file, as `costs.json` names it."""
    return item.nodeid.partition("::")[0]


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
    if config.option.part:
        try:
            Part.read(config.option.part)
        except ValueError as error:
            raise pytest.UsageError(f"--part: {error}") from None
    config.pluginmanager.register(Timekeeper(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    late = Counter(
        report.nodeid.partition("::")[0] for report in skipped if NO_TIME in str(report.longrepr)
    )
    if late:
        terminalreporter.write_line(f"{late.total()} slow tests did not run: {NO_TIME}")
        for file, count in sorted(late.items()):
            terminalreporter.write_line(f"left out: {count} of {file}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other parts' slow tests, and begin with the costliest files: in the end no worker
    is alone with one of them."""
    costs = Costs.read()
    if config.option.part:
        own = Part.read(config.option.part).of_files(map(file_of, items), costs)
        other = [item for item in items if is_slow(item) and file_of(item) not in own]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if not is_slow(item) or file_of(item) in own]
    kinds = {(file_of(item), is_slow(item)) for item in items}
    cost = Counter[str]()
    for file, slow in kinds:
        cost[file] += (costs.slow if slow else costs.quick).get(file, 0.0)
    sign = 1 if config.option.backwards else -1
    items.sort(key=lambda item: (sign * cost[file_of(item)], file_of(item)))


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
