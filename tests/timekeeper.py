"""Says before the tests how long they will take, and writes what they cost if that is asked for."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from costs import NAMED_S, ROOT, Costs, Part, Row
from selection import ALWAYS, function_of
from sweeps import MARKS, is_slow

KINDS = {
    f"not ({' or '.join(MARKS)})": ("quick",),
    " or ".join(MARKS): ("slow",),
    "": ("quick", "slow"),
}
"""Which costs make's targets have, by what they give to `-m`."""


COST = "cost"
"""The attribute of a report with its phase's seconds, kind and function, and the collection's s."""


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
    paths = [Path(config.invocation_params.dir, each.partition("::")[0]) for each in config.args]
    chosen = below(files, [os.path.relpath(path, ROOT) for path in paths])
    known = costs.rows.keys()
    quick_s = sum(costs.row(file).quick() for file in chosen) if "quick" in kinds else 0.0
    if config.option.part:
        costs = costs.in_part(Part.read(config.option.part))
    slow_s = sum(costs.row(file).left_out for file in chosen) if "slow" in kinds else 0.0
    workers = workers_of(config)
    work_s = quick_s + slow_s + workers * costs.collection_s * len(chosen) / max(1, len(files))
    cores = min(workers, os.cpu_count() or 1)
    speed = yardstick() / costs.yardstick_s
    unknown = len(chosen - known)
    return (
        f"forecast: {in_words(work_s * speed * costs.waiting / cores)} if nothing else runs here "
        f"({in_words(work_s)} of work by tests/costs.json, times {speed:.2f} for this processor, "
        f"on {cores} of its cores)" + (f"; {unknown} files have no row there" if unknown else "")
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
        self._files: dict[str, FileTimes] = defaultdict(FileTimes)

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
        kind = "slow" if is_slow(item) else "rest" if item.get_closest_marker(ALWAYS) else "table"
        cost = (now - self._before, kind, function_of(item), self._collection_s)
        setattr(report, COST, cost)  # Reports keep what they are given on the way to that process.
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, COST):
            seconds, kind, function, self._collection_s = getattr(report, COST)
            times = self._files[report.nodeid.partition("::")[0]]
            times.add(seconds, kind, function, report.when == "call")

    def pytest_sessionfinish(self) -> None:
        if self._config.option.write_costs and not hasattr(self._config, "workerinput"):
            self._renewed(time.monotonic() - self._begun, workers_of(self._config)).write()

    def _renewed(self, took_s: float, workers: int) -> Costs:
        """Return the costs with what has run in place of what was known of these files."""
        here_s = yardstick()
        yardstick_s = self._costs.yardstick_s or here_s
        scale = yardstick_s / here_s
        spent_s = sum(times.total for times in self._files.values()) + workers * self._collection_s
        rows = {file: row for file, row in self._costs.rows.items() if (ROOT / file).exists()}
        kinds = KINDS.get(self._config.option.markexpr, ())
        for file, times in self._files.items():
            rows[file] = times.renewed(self._costs.row(file), scale, kinds)
        return replace(
            self._costs,
            yardstick_s=round(yardstick_s, 4),
            collection_s=round(self._collection_s * scale, 1),
            waiting=round(max(1.0, took_s * workers / spent_s), 2),
            rows=rows,
        )


@dataclass
class FileTimes:
    """What the tests of a file took in this run, in seconds of processor time.

    Attributes:
        rest: of fixtures, and of tests that `make test` runs whatever they cost.
        slow: of tests with a slow mark of their own.
        calls: of the cases of each other function, without fixtures.
    """

    rest: float = 0.0
    slow: float = 0.0
    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def total(self) -> float:
        """All of it."""
        return self.rest + self.slow + sum(map(sum, self.calls.values()))

    def add(self, seconds: float, kind: str, function: str, call: bool) -> None:
        """Count a phase of a test; only that of the test itself makes it costly."""
        if kind == "slow":
            self.slow += seconds
        elif kind == "table" and call:
            self.calls[function].append(seconds)
        else:
            self.rest += seconds

    def renewed(self, known: Row, scale: float, kinds: Collection[str]) -> Row:
        """Return a file's row with these times, scaled, in place of those known of these kinds."""
        row = known
        if "slow" in kinds:
            row = replace(row, slow=round(self.slow * scale, 1))
        if "quick" in kinds:
            sums = {name: sum(calls) * scale for name, calls in self.calls.items()}
            tables = {
                name: (round(sums[name] / len(calls), 3), len(calls))
                for name, calls in sorted(self.calls.items())
                if sums[name] > NAMED_S
            }
            rest = self.rest * scale + sum(s for name, s in sums.items() if name not in tables)
            row = replace(row, rest=round(rest, 1), tables=tables)
        return row
