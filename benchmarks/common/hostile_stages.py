"""Report where ordinary requests waited during hostile.py, from the server's access log."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_LINE = re.compile(
    r"request_id=(quiet|hostile)-(text|picture)-\d+ .*"
    r"prepare_ms=(\S+) stages_ms=(\S*) ttft_ms=([\d.]+)"
)
SLOWEST = 0.03
STAGES = {
    "body": "read, parsed and validated, and turns of the event loop",
    "render": "rendered and checked, on a preparation thread",
    "source": "a medium's thread, its data: URL and the look into the index",
    "place": "waiting for a decoding process",
    "decode": "in that process",
    "resize": "resized and hashed",
    "finish": "expanded and tokenised",
    "engine": "from the engine's queue to its first token",
}


def _stages(prepare: float, found: dict[str, float], first_token: float) -> dict[str, float]:
    inside = ("place", "decode", "resize")
    known = {name: found.get(name, 0.0) for name in ("render", *inside, "finish")}
    media = found.get("media", 0.0)
    return known | {
        "source": media - sum(known[name] for name in inside),
        "body": prepare - known["render"] - media - known["finish"],
        "engine": first_token - prepare,
    }


def stage_lines(log: Path) -> Iterator[str]:
    """A table: of each kind of question the mean of every stage, in milliseconds, over the middle
    fifth by time to first token, and over the slowest SLOWEST."""
    rows: dict[tuple[str, str], list[tuple[float, dict[str, float]]]] = defaultdict(list)
    for line in _LINE.finditer(log.read_text(errors="replace")):
        phase, kind, prepare, stages, first = line.groups()
        pairs = (each.split(":") for each in stages.split(",") if each)
        found = {name: float(value) for name, value in pairs}
        rows[kind, phase].append((float(first), _stages(float(prepare), found, float(first))))
    yield "ms by stage".ljust(28) + "".join(f"{name:>8}" for name in ("all", *STAGES))
    for kind, phase in sorted(rows):
        ordered = sorted(rows[kind, phase], key=lambda row: row[0])
        count = len(ordered)
        middle = ordered[count * 2 // 5 : count * 3 // 5 + 1]
        slowest = ordered[-max(1, int(count * SLOWEST)) :]
        for name, part in (("middle", middle), ("slowest", slowest)):
            means = [sum(total for total, _ in part) / len(part)]
            means += [sum(each[stage] for _, each in part) / len(part) for stage in STAGES]
            label = f"{kind}, {phase}, {name} {len(part)}"
            yield label.ljust(28) + "".join(f"{mean:>8.1f}" for mean in means)
