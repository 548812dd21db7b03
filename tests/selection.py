"""Which of the collected tests run, in which order, and what is said of those that do not."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import pytest
from costs import Costs, Part, kept
from sweeps import is_slow

NO_TIME = "no time was left for slow tests"
ALWAYS = "always"
"""The mark of the tests that `make test` runs whatever they cost."""


def file_of(item: pytest.Item) -> str:
    """Return a test's file, as `costs.json` names it."""
    return item.nodeid.partition("::")[0]


def function_of(item: pytest.Item) -> str:
    """Return a test's function, as `costs.json` names it."""
    return item.nodeid.partition("::")[2].partition("[")[0]


class Selection:
    """Marks what costs too much for `make test`, and chooses a part of what it leaves out."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the options.

        Raises:
            pytest.UsageError: there is no such part.
        """
        self._costs = Costs.read()
        self._measures = config.option.write_costs
        self._begun = time.monotonic()
        self._slow_s = 60 * config.option.slow_minutes
        self._backwards = config.option.backwards
        try:
            self._part = Part.read(config.option.part) if config.option.part else None
        except ValueError as error:
            raise pytest.UsageError(f"--part: {error}") from None

    @pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
    def pytest_mark_costly_cases(self, items: list[pytest.Item]) -> None:
        """Mark the further cases of tables that would cost more than their share, before `-m`
        chooses. While costs are measured all cases count."""
        if self._measures:
            return
        seen = Counter[tuple[str, str]]()
        for item in items:
            key = file_of(item), function_of(item)
            table = self._costs.row(key[0]).tables.get(key[1])
            if table is None or is_slow(item) or item.get_closest_marker(ALWAYS):
                continue
            seen[key] += 1
            if seen[key] > kept(table[0]):
                item.add_marker(pytest.mark.sweep)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out other parts' slow tests, and begin with the costliest files: in the end no
        worker is alone with one of them."""
        if self._part is not None:
            own = self._part.of_files(map(file_of, items), self._costs)
            others = [item for item in items if is_slow(item) and file_of(item) not in own]
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if not is_slow(item) or file_of(item) in own]
        costs: dict[str, float] = defaultdict(float)
        for file, slow in {(file_of(item), is_slow(item)) for item in items}:
            row = self._costs.row(file)
            costs[file] += row.left_out if slow else row.quick()
        sign = 1 if self._backwards else -1
        items.sort(key=lambda item: (sign * costs[file_of(item)], file_of(item)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() - self._begun > self._slow_s and is_slow(item):
            pytest.skip(NO_TIME)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        skipped = terminalreporter.stats.get("skipped", [])
        late = [report for report in skipped if NO_TIME in str(report.longrepr)]
        if late:
            terminalreporter.write_line(f"{len(late)} slow tests did not run: {NO_TIME}")
        for file, count in sorted(Counter(r.nodeid.partition("::")[0] for r in late).items()):
            terminalreporter.write_line(f"left out: {count} of {file}")
