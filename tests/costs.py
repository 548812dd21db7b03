"""What each file of tests costs, and which of three landings' CI runs its slow tests.

`costs.json` has a row for each file: the seconds of processor time that its quick tests and its
slow ones took. `make test-all ARGS=--write-costs` writes it anew, on a machine with nothing else to
do. Runs are foretold and divided by it (`tests/timekeeper.py`); no test compares a time with it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COSTS = ROOT / "tests" / "costs.json"


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
    """The rows of `costs.json`.

    Attributes:
        yardstick_s: what `timekeeper.yardstick` took on the machine of these numbers.
        collection_s: processor time in which one worker imports and collects every file.
        waiting: a worker's time by the clock over its processor time: tests wait as well.
        quick: seconds by file, without those that have no such tests.
        slow: likewise.
    """

    yardstick_s: float = 0.0
    collection_s: float = 0.0
    waiting: float = 1.0
    quick: Mapping[str, float] = field(default_factory=dict)
    slow: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = COSTS) -> Costs:
        """Read the file; without it nothing is known."""
        if not path.exists():
            return cls()
        read = json.loads(path.read_text(encoding="utf-8"))
        rows: dict[str, dict[str, float]] = {"quick": {}, "slow": {}}
        for file, row in read.pop("files").items():
            for kind, seconds in row.items():
                rows[kind][file] = seconds
        return cls(**read, **rows)

    def write(self, path: Path = COSTS) -> None:
        """Write the file with one line for each row."""
        lines = [
            f'  "{name}": {getattr(self, name)},\n'
            for name in ("yardstick_s", "collection_s", "waiting")
        ]
        rows = []
        for file in sorted({*self.quick, *self.slow}):
            row = {
                kind: getattr(self, kind)[file]
                for kind in ("quick", "slow")
                if file in getattr(self, kind)
            }
            rows.append(f"    {json.dumps(file)}: {json.dumps(row)}")
        text = "".join(["{\n", *lines, '  "files": {\n', ",\n".join(rows), "\n  }\n}\n"])
        path.write_text(text, encoding="utf-8")

    def in_part(self, part: Part) -> Costs:
        """Return these costs without the slow tests of other parts."""
        numbers = self.divide(part.of)
        chosen = {file: s for file, s in self.slow.items() if numbers[file] == part.number}
        return replace(self, slow=chosen)

    def divide(self, parts: int) -> dict[str, int]:
        """Return for each file with slow tests the part that they belong to, from 1.

        The costliest file comes first and goes to the part that has least so far.
        """
        loads = [0.0] * parts
        numbers = {}
        for file in sorted(self.slow, key=lambda name: (-self.slow[name], name)):
            part = loads.index(min(loads))
            loads[part] += self.slow[file]
            numbers[file] = part + 1
        return numbers
