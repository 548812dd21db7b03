"""Says before the tests how long they will take, and writes what they cost if that is asked for."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from costs import ROOT, Costs, Part
from sweeps import MARKS

KINDS = {
    f"not ({' or '.join(MARKS)})": ("quick",),
    " or ".join(MARKS): ("slow",),
    "": ("quick", "slow"),
}
"""Which costs make's targets have, by what they give to `-m`."""


def yardstick() -> float:
    """Return the processor time of a fixed piece of work in Python, the least of three tries."""
    tries = []
    for _ in range(3):
        begun = time.process_time()
        table: dict[int, int] = {}
        for number in range(200_000):
            table[number * 7919 % 4099] = table.get(number % 4099, 0) + number
        tries.append(time.process_time() - begun)
    return min(tries)


def processor_time() -> float:
    """Return the processor time of this process and of its children that have ended, in s."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def forecast(config: pytest.Config, costs: Costs, files: Collection[str]) -> str | None:
    """Return a sentence that says how long a run will take; None if that is not known.

    What is known is the cost of whole files, with the markers that make's targets select.

    Args:
        config: with the options, paths and workers of the run.
        costs: those of files.
        files: all files of tests, by their paths from the root.
    """
    kinds = KINDS.get(config.option.markexpr)
    if kinds is None or config.option.keyword or not costs.yardstick_s:
        return None
    if config.option.part:
        costs = costs.in_part(Part.read(config.option.part))
    paths = [Path(config.invocation_params.dir, each.partition("::")[0]) for each in config.args]
    chosen = below(files, [os.path.relpath(path, ROOT) for path in paths])
    work_s = sum(getattr(costs, kind).get(file, 0.0) for kind in kinds for file in chosen)
    workers = workers_of(config)
    work_s += workers * costs.collection_s * len(chosen) / max(1, len(files))
    cores = min(workers, os.cpu_count() or 1)
    speed = yardstick() / costs.yardstick_s
    return (
        f"forecast: {in_words(work_s * speed * costs.waiting / cores)} if nothing else runs here "
        f"({in_words(work_s)} of work by tests/costs.json, times {speed:.2f} for this processor, "
        f"on {cores} of its cores)"
    )


def workers_of(config: pytest.Config) -> int:
    """Return how many processes run tests."""
    return len(getattr(config.option, "tx", None) or ["this one"])


def below(files: Iterable[str], folders: Iterable[str]) -> set[str]:
    """Return the files that are one of the paths or below one; all have forms like `tests/a`."""
    prefixes = tuple("" if folder == "." else f"{folder}/" for folder in folders)
    return {file for file in files if f"{file}/".startswith(prefixes)}


def in_words(seconds: float) -> str:
    """Say a time as exactly as somebody who waits wants to know it."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


class Timekeeper:
    """Prints the forecast, and with `--write-costs` adds up what workers report.

    Each worker notes in its reports what processor time has gone since the report before.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._costs = Costs.read()
        self._begun = time.monotonic()
        self._before = processor_time()
        self._collection_s = 0.0
        self._spent: dict[str, dict[str, float]] = {
            kind: defaultdict(float) for kind in ("quick", "slow")
        }

    def pytest_report_header(self) -> str | None:
        files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
        return forecast(self._config, self._costs, files)

    def pytest_collection_finish(self) -> None:
        self._collection_s = processor_time() - self._before
        self._before = processor_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = processor_time()
        report.cost_s = now - self._before
        report.cost_kind = "slow" if any(map(item.get_closest_marker, MARKS)) else "quick"
        report.collection_s = self._collection_s
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "cost_s"):
            file = report.nodeid.partition("::")[0]
            self._spent[report.cost_kind][file] += report.cost_s
            self._collection_s = report.collection_s

    def pytest_sessionfinish(self) -> None:
        if self._config.option.write_costs and not hasattr(self._config, "workerinput"):
            self._renewed(time.monotonic() - self._begun, workers_of(self._config)).write()

    def _renewed(self, took_s: float, workers: int) -> Costs:
        """Return the costs with what has run in place of what was known of these files."""
        here_s = yardstick()
        yardstick_s = self._costs.yardstick_s or here_s
        spent_s = sum(sum(of_kind.values()) for of_kind in self._spent.values())
        spent_s += workers * self._collection_s
        ran = {file for of_kind in self._spent.values() for file in of_kind}
        rows = {}
        for kind in KINDS.get(self._config.option.markexpr, ()):
            known = getattr(self._costs, kind)
            rows[kind] = {f: s for f, s in known.items() if f not in ran and (ROOT / f).exists()}
            for file, seconds in self._spent[kind].items():
                rows[kind][file] = round(seconds * yardstick_s / here_s, 1)
        return replace(
            self._costs,
            yardstick_s=round(yardstick_s, 4),
            collection_s=round(self._collection_s * yardstick_s / here_s, 1),
            waiting=round(max(1.0, took_s * workers / spent_s), 2),
            **rows,
        )
