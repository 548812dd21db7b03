"""The table of tiles that gpu_tune.py writes for the card it ran on (`kernels/tuning.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_serve.kernels.tuning import FIXED_STEPS

LEAST_GAIN = 0.03
"""Share of its time that another tile must save: other tiles have other bits."""
MOST_LOSS = 0.1
"""Share of the library's time that the fixed product may take longer, in steps with prompts."""
LARGEST_DIFFERENCE = 0.02
"""Of a result from the first variant's, relative to its largest value."""

Fields = Mapping[str, int]


@dataclass(frozen=True)
class Timed:
    """A variant that was measured.

    Attributes:
        op: its name in a table; "" if no table has it.
        fields: of its tile.
        usual: True for the tile that serves without a change.
        us: microseconds; None if it could not run.
        difference: of its result from the first variant's.
    """

    op: str
    fields: Fields
    usual: bool
    us: float | None
    difference: float = 0.0


def best_tiles(timed: Sequence[Timed], before: Mapping[str, Fields]) -> dict[str, dict[str, int]]:
    """Return the fields by ops that a table should have.

    An op gets another tile if that is faster than the usual one by LEAST_GAIN and right. All others
    keep what the table before has, since the usual tile follows it. Steps with prompts get the
    fixed product if that is at most MOST_LOSS slower than the library.
    """
    found = {op: dict(fields) for op, fields in before.items()}
    for op in dict.fromkeys(each.op for each in timed if each.op):
        ran = [each for each in timed if each.op == op and each.us is not None]
        right = [each for each in ran if each.difference <= LARGEST_DIFFERENCE]
        usual = min((each.us or 0.0 for each in right if each.usual), default=None)
        best = min(right, key=lambda each: each.us or 0.0, default=None)
        if usual is None or best is None or best.us is None:
            continue
        if best.us <= (1 - LEAST_GAIN) * usual:
            found[op] = {**found.get(op, {}), **best.fields}
    choice = {each.fields["fixed"]: each for each in timed if each.op == FIXED_STEPS}
    if len(choice) == 2:
        library, fixed = choice[0].us, choice[1].us
        if library is not None and fixed is not None:
            near = choice[1].difference <= LARGEST_DIFFERENCE
            found[FIXED_STEPS] = {"fixed": int(near and fixed <= (1 + MOST_LOSS) * library)}
    return found


def write_table(
    folder: Path, architecture: int, ops: Mapping[str, Fields], about: Mapping[str, str]
) -> Path:
    """Write an architecture's table, in the form that `kernels/tuning/` has.

    Args:
        folder: where; made if it is missing.
        architecture: compute capability (90).
        ops: fields by ops.
        about: what it was measured on, for its readers alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sm_{architecture}.json"
    path.write_text(json.dumps({**about, "ops": ops}, indent=1) + "\n", encoding="utf-8")
    return path
