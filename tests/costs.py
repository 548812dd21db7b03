"""What tests cost, by which `make test` leaves some out and CI's parts of the others are divided.

`costs.json` has a row for each file. `make test-all ARGS=--write-costs` measures them anew, on a
machine with nothing else to do; `make test` and `make test-slow` measure their half, with all cases
of tables. No test compares a time with it.

    .venv/bin/python tests/costs.py

prints the minutes of processor time of `make test` and of each part, and those of `make test` if a
table had another share.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COSTS = ROOT / "tests" / "costs.json"
PARTS = 3
"""Landings whose CI runs every slow test."""
SHARE_S = 0.5
"""What all cases of one test function may cost in `make test`, in seconds of processor time."""
FIRST_S = 0.7
"""What its first case may cost there if it is the only one."""
NAMED_S = 0.5
"""What the cases of a function cost together before the file names it."""
MOST_MINUTES = 14.0
"""Processor time of `make test`: two cores do that within eight minutes, and have time to wait."""


@dataclass(frozen=True, slots=True)
class Row:
    """The costs of a file, in seconds of processor time.

    Attributes:
        rest: fixtures, and tests that are neither in `tables` nor slow by their mark.
        slow: tests with a slow mark of their own.
        tables: seconds a case, and cases, by function.
    """

    rest: float = 0.0
    slow: float = 0.0
    tables: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def quick(self, share_s: float = SHARE_S) -> float:
        """Return what `make test` runs of it."""
        return self.rest + sum(
            cost_s * min(cases, kept(cost_s, share_s)) for cost_s, cases in self.tables.values()
        )

    @property
    def left_out(self) -> float:
        """What `make test` leaves out."""
        tables = sum(cost_s * cases for cost_s, cases in self.tables.values())
        return self.slow + self.rest + tables - self.quick()


def kept(cost_s: float, share_s: float = SHARE_S) -> int:
    """Return how many cases of a function stay in `make test` when one costs so much."""
    return max(int(share_s / max(cost_s, 1e-6)), int(cost_s <= FIRST_S))


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts of the slow tests.

    Attributes:
        number: from 1.
        of: how many parts there are.
    """

    number: int
    of: int

    @classmethod
    def read(cls, text: str) -> Part:
        """Read `2/3`.

        Raises:
            ValueError: there is no such part.
        """
        number, _, of = text.partition("/")
        part = cls(int(number), int(of))
        if not 1 <= part.number <= part.of:
            raise ValueError(f"{text} is no part, as 2/3 is")
        return part

    def of_files(self, files: Iterable[str], costs: Costs) -> set[str]:
        """Return those of the files whose slow tests belong to this part.

        A file without a row belongs to one by its name, so each belongs to the same everywhere.
        """
        numbers = costs.divide(self.of)
        return {
            file
            for file in files
            if numbers.get(file, zlib.crc32(file.encode()) % self.of + 1) == self.number
        }


@dataclass(frozen=True, slots=True)
class Costs:
    """What `costs.json` says.

    Attributes:
        yardstick_s: what `timekeeper.yardstick` took on the machine of these numbers.
        collection_s: processor time in which one worker imports and collects every file.
        waiting: a worker's time by the clock over its processor time: tests wait as well.
        rows: by file, such as `tests/cache/test_tiers.py`.
    """

    yardstick_s: float = 0.0
    collection_s: float = 0.0
    waiting: float = 1.0
    rows: Mapping[str, Row] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = COSTS) -> Costs:
        """Read the file; without it nothing is known."""
        if not path.exists():
            return cls()
        read = json.loads(path.read_text(encoding="utf-8"))
        rows = {}
        for file, row in read.pop("rows").items():
            tables = {name: (cost_s, cases) for name, (cost_s, cases) in row["tables"].items()}
            rows[file] = Row(row["rest"], row["slow"], tables)
        return cls(**read, rows=rows)

    def write(self, path: Path = COSTS) -> None:
        """Write the file with one line for each row."""
        names = ("yardstick_s", "collection_s", "waiting")
        head = "".join(f'  "{name}": {getattr(self, name)},\n' for name in names)
        rows = [
            f"    {json.dumps(file)}: "
            + json.dumps({"rest": row.rest, "slow": row.slow, "tables": dict(row.tables)})
            for file, row in sorted(self.rows.items())
        ]
        text = "{\n" + head + '  "rows": {\n' + ",\n".join(rows) + "\n  }\n}\n"
        path.write_text(text, encoding="utf-8")

    def row(self, file: str) -> Row:
        """Return a file's costs; one that is not known has none."""
        return self.rows.get(file, Row())

    def in_part(self, part: Part) -> Costs:
        """Return these costs with the files alone whose slow tests belong to a part."""
        own = part.of_files(self.rows, self)
        return replace(self, rows={file: row for file, row in self.rows.items() if file in own})

    def divide(self, parts: int) -> dict[str, int]:
        """Return the part that each file's slow tests belong to, from 1.

        The costliest file comes first and goes to the part that has least so far.
        """
        loads = [0.0] * parts
        numbers = {}
        for file in sorted(self.rows, key=lambda name: (-self.rows[name].left_out, name)):
            part = loads.index(min(loads))
            loads[part] += self.rows[file].left_out
            numbers[file] = part + 1
        return numbers

    def quick_minutes(self, share_s: float = SHARE_S) -> float:
        """Return the processor time of `make test` with two workers, in minutes."""
        return (2 * self.collection_s + sum(row.quick(share_s) for row in self.rows.values())) / 60


def main() -> None:
    """Print the sums."""
    costs = Costs.read()
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    print(f"{len(files - costs.rows.keys())} of {len(files)} files are not measured")
    print(f"make test: {costs.quick_minutes():.1f} of {MOST_MINUTES:.0f} minutes on one core")
    for share_s in (0.3, 0.5, 1.0, 2.0, 3.0, 5.0):
        print(f"    {costs.quick_minutes(share_s):5.1f} if SHARE_S were {share_s}")
    for number in range(1, PARTS + 1):
        part = costs.in_part(Part(number, PARTS))
        minutes = sum(row.left_out for row in part.rows.values()) / 60
        print(f"make test-slow, part {number} of {PARTS}: {minutes:.1f} minutes on one core")


if __name__ == "__main__":
    main()
