"""Report which hostile cases were open while ordinary questions waited for their first token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hostile_client import Outcome
from hostile_traffic import Asked

SLOWEST = 0.03


def beside_lines(asked: Sequence[Asked], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A table: by kind of case how many there were, the seconds that they were open, and the share
    of ordinary questions beside which one was open: of all questions and of the slowest SLOWEST of
    each kind. A kind that slows others is beside more of the slowest than of all."""
    slowest = [each for kind in {each.kind for each in asked} for each in _slowest(asked, kind)]
    header = (f"{name:>9}" for name in ("cases", "seconds", "all", "slowest", "times"))
    yield "open beside questions".ljust(28) + "".join(header)
    rows = []
    for kind in {each.kind for each in outcomes}:
        cases = [each for each in outcomes if each.kind == kind]
        shares = [_share(part, cases) for part in (asked, slowest)]
        rows.append((shares[1] / shares[0] if shares[0] else 0.0, kind, cases, shares))
    for times, kind, cases, (of_all, of_slowest) in sorted(rows, reverse=True, key=lambda r: r[:2]):
        seconds = sum(each.seconds for each in cases)
        numbers = f"{len(cases):>9}{seconds:>9.1f}{of_all:>9.1%}{of_slowest:>9.1%}{times:>9.2f}"
        yield kind.ljust(28) + numbers


def _slowest(asked: Sequence[Asked], kind: str) -> list[Asked]:
    ordered = sorted((each for each in asked if each.kind == kind), key=lambda e: e.first_token)
    return ordered[-max(1, int(len(ordered) * SLOWEST)) :]


def _share(asked: Sequence[Asked], cases: Sequence[Outcome]) -> float:
    """Of the questions, of those that waited while one of the cases was open."""
    beside = sum(
        any(
            case.began < each.began + each.first_token and each.began < case.began + case.seconds
            for case in cases
        )
        for each in asked
    )
    return beside / len(asked) if asked else 0.0
