"""Comparison of the replies of both sides."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from vlm_serve.eval.replies import AnswerRun, Reply


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the two replies to an item.

    Attributes:
        item: name of the item.
        what: such as "text", "finish reason" or "score of B".
        cached, uncached: value of each side.
    """

    item: str
    what: str
    cached: str
    uncached: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A part of a benchmark, answered by both sides.

    Attributes:
        part, note: as in `BenchmarkPart`.
        cached, uncached: the sides.
        differences: of items with answers on both sides.
        failed: (side, item, error) of each failed request.
    """

    part: str
    note: str
    cached: AnswerRun
    uncached: AnswerRun
    differences: tuple[Difference, ...]
    failed: tuple[tuple[str, str, str], ...]

    @property
    def num_items(self) -> int:
        return len(self.cached.replies)

    @property
    def num_different(self) -> int:
        return len({difference.item for difference in self.differences})

    @property
    def num_failed(self) -> int:
        return len({item for _, item, _ in self.failed})

    @property
    def num_equal(self) -> int:
        return self.num_items - self.num_different - self.num_failed

    @property
    def accuracy(self) -> dict[str, tuple[int, int]]:
        """Scores by group, "all" first: right answers with caching, and known answers."""
        right, known = Counter[str](), Counter[str]()
        for reply in self.cached.replies:
            if reply.right is not None:
                known.update(("all", *reply.groups))
                right.update(("all", *reply.groups) if reply.right else ())
        return {group: (right[group], known[group]) for group in known}


def compare(part: str, note: str, cached: AnswerRun, uncached: AnswerRun) -> Comparison:
    """Compare the replies of both sides, which have the same items in the same order."""
    differences: list[Difference] = []
    failed: list[tuple[str, str, str]] = []
    for with_cache, without in zip(cached.replies, uncached.replies, strict=True):
        assert with_cache.item == without.item
        errors = [
            (side, reply.item, reply.error)
            for side, reply in (("with caching", with_cache), ("without", without))
            if reply.error is not None
        ]
        failed += errors
        if not errors:
            differences += _differences(with_cache, without)
    return Comparison(part, note, cached, uncached, tuple(differences), tuple(failed))


def _differences(cached: Reply, uncached: Reply) -> list[Difference]:
    pairs = list(zip(_facts(cached).items(), _facts(uncached).items(), strict=False))
    differences = [
        Difference(cached.item, aspect, one, other)
        for (aspect, one), (_, other) in pairs
        if one != other
    ]
    counts = len(_facts(cached)), len(_facts(uncached))
    if counts[0] != counts[1]:
        differences.append(Difference(cached.item, "number of answers", *map(str, counts)))
    return differences


def _facts(reply: Reply) -> dict[str, str]:
    """Return the facts to compare, as text. Scores include all bits of each log-probability, since
    their sum would lose some."""
    facts: dict[str, str] = {}
    for number, answer in enumerate(reply.answers, start=1):
        turn = f" of turn {number}" if len(reply.answers) > 1 else ""
        facts[f"text{turn}"] = answer.text
        facts[f"reasoning{turn}"] = answer.reasoning
        facts[f"finish reason{turn}"] = answer.finish_reason
        facts[f"tokens{turn}"] = " ".join(map(str, answer.token_ids))
    for number, score in enumerate(reply.scores):
        bits = " ".join(probability.hex() for probability in score)
        facts[f"score of {chr(ord('A') + number)}"] = f"{sum(score)!r} ({bits})"
    return facts
