"""Regular expressions that come from files, matched without backtracking.

Python's `re` may need years for a pattern of a few letters, and no other thread runs meanwhile. So
`re` only parses a pattern here. A match moves a set of positions in a name, the bits of a number,
through the parts of the pattern, forwards or, for what looks ahead, backwards. Repetitions end when
they reach no new position, and the patterns of a file share a budget of steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import groupby
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from vlm_serve.errors import CheckpointError

MAX_PATTERN = 4096
MAX_NAME = 2048
MAX_STEPS = 5_000_000
"""Steps that the patterns of a file may take: some seconds."""
_STEPS_PER_NAME = 100
"""Added for every name: models of many experts have some hundred thousand."""
_SHOWN = 80
_CHARACTERS = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)
_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}
_OF_CHARACTERS = re.IGNORECASE | re.ASCII | re.DOTALL
_KINDS_OF_TEXT = re.ASCII | re.UNICODE


class _SpentError(Exception):
    """The budget is spent."""


class Budget:
    """The steps that are left to the patterns of a file, and the name that they match."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps
        self._name = _Name("")

    def spend(self, steps: int) -> None:
        """Take steps from what is left. Raises _SpentError."""
        self.left -= steps
        if self.left < 0:
            raise _SpentError

    def name(self, text: str) -> _Name:
        """Return a name to match; patterns are matched with the same one in turn."""
        if self._name.text != text:
            self.left += _STEPS_PER_NAME
            self._name = _Name(text)
        self._name.budget = self
        return self._name


class _Name:
    """A name to match: position p, before its character p, is bit p of a set."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._weight = 1 + len(text) // 512
        self.all = (2 << len(text)) - 1
        self.budget: Budget
        self._known: dict[re.Pattern[str] | str, int] = {}

    def spend(self, steps: int) -> None:
        """Take steps from the budget. Long names have long sets."""
        self.budget.spend(steps * self._weight)

    def starts(self, letters: str) -> int:
        """Return the places where a text begins."""
        found = self._known.get(letters)
        if found is None:
            found, place = 0, self.text.find(letters)
            self.spend(4)
            while place >= 0:
                self.spend(1)
                found |= 1 << place
                place = self.text.find(letters, place + 1)
            self._known[letters] = found
        return found

    def where(self, kind: re.Pattern[str]) -> int:
        """Return the places of characters of a kind."""
        found = self._known.get(kind)
        if found is None:
            self.spend(4 * len(self._letters))
            found = sum(self.starts(each) for each in self._letters if kind.match(each))
            self._known[kind] = found
        return found

    @cached_property
    def _letters(self) -> set[str]:
        return set(self.text)


_Step = Callable[[_Name, int, bool], int]
"""Takes positions to those behind a part of a pattern; backwards, to those in front of it."""


class Pattern:
    """A regular expression of a file, with the meaning that it has to Python's `re`.

    Args:
        text: as in the file.
        place: file and field, for messages.
        before, behind: expressions around it. It must be an expression without them.
        budget: of the file; None: its own.

    Raises:
        CheckpointError: it is none, it is too long, or it depends on the order of tries.
    """

    def __init__(
        self,
        text: str,
        place: str,
        before: str = "",
        behind: str = "",
        budget: Budget | None = None,
    ) -> None:
        self._arguments = text, place, before, behind
        self._shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
        self.budget = budget or Budget()
        if len(text) > MAX_PATTERN:
            raise self._error(f"has {len(text)} characters, more than {MAX_PATTERN}")
        try:
            self.budget.spend(20 * len(text))
            tree = _parser.parse(text)
            if before or behind:
                tree = _parser.parse(before + text + behind)
            self._step = _sequence(tree, tree.state.flags, self.budget)
        except (re.error, OverflowError) as error:
            raise self._error(f"is no pattern: no regular expression ({error})") from None
        except _UnsupportedError:
            problem = (
                "has a back-reference, a condition or a possessive part, which is not supported"
            )
            raise self._error(problem) from None
        except (RecursionError, _SpentError) as error:
            raise self._too_costly(error) from None

    def match(self, name: str) -> bool:
        """Return True if it matches from the name's beginning on, as `re.match`.

        Raises:
            CheckpointError: that takes too long, or the name is too long for one.
        """
        if len(name) > MAX_NAME:
            raise CheckpointError(
                f"{name[:_SHOWN]!r}... has {len(name)} characters, too many for a module's name"
            )
        try:
            return bool(self._step(self.budget.name(name), 1, False))
        except (RecursionError, _SpentError) as error:
            raise self._too_costly(error) from None

    def _too_costly(self, error: Exception) -> CheckpointError:
        if isinstance(error, RecursionError):
            return self._error("is nested too deeply")
        return self._error("takes too long to match, or those before it: write simpler ones")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._arguments[1]}: {self._shown} {problem}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self._arguments == other._arguments

    def __hash__(self) -> int:
        return hash(self._arguments)

    def __reduce__(self) -> tuple[type[Pattern], tuple[str, ...]]:
        return Pattern, self._arguments


def share_budget(patterns: Iterable[Pattern]) -> None:
    """Give the patterns of one file one budget."""
    budget = Budget()
    for each in patterns:
        each.budget = budget


class _UnsupportedError(Exception):
    """What a pattern matches depends on the order of tries, or on groups."""


def _sequence(items: Iterable[tuple[Any, Any]], flags: int, budget: Budget) -> _Step:
    """Return the step of a parsed sequence. Letters that follow each other are one part."""
    steps = list[_Step]()
    for plain, part in groupby(items, lambda each: _is_letter(each[0], flags)):
        if plain:
            steps.append(_letters("".join(chr(code) for _, code in part)))
        else:
            steps += [_step(kind, value, flags, budget) for kind, value in part]
    backwards = steps[::-1]

    def run(name: _Name, at: int, back: bool) -> int:
        count = 1
        for step in backwards if back else steps:
            count += 1
            at = step(name, at, back)
            if not at:
                break
        name.spend(count)
        return at

    return run


def _is_letter(kind: Any, flags: int) -> bool:
    return kind is op.LITERAL and not flags & re.IGNORECASE


def _letters(text: str) -> _Step:
    size = len(text)

    def run(name: _Name, at: int, back: bool) -> int:
        starts = name.starts(text)
        return at >> size & starts if back else (at & starts) << size

    return run


def _step(kind: Any, value: Any, flags: int, budget: Budget) -> _Step:
    if kind in _CHARACTERS:
        return _character(_mask(kind, value, flags, budget))
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
        return _repetition(*value, flags, budget)
    if kind is op.SUBPATTERN:
        _, more, less, items = value
        kept = flags & ~_KINDS_OF_TEXT if more & _KINDS_OF_TEXT else flags
        return _sequence(items, (kept | more) & ~less, budget)
    if kind is op.BRANCH:
        return _branch([_sequence(items, flags, budget) for items in value[1]])
    if kind is op.AT:
        return _place(value, flags)
    if kind in (op.ASSERT, op.ASSERT_NOT):
        direction, items = value
        return _look(_sequence(items, flags, budget), direction > 0, kind is op.ASSERT)
    if kind is op.FAILURE:
        return lambda name, at, back: 0
    raise _UnsupportedError


_Mask = Callable[[_Name], int]


def _mask(kind: Any, value: Any, flags: int, budget: Budget) -> _Mask:
    """Return what finds the places of a kind of characters."""
    if _is_letter(kind, flags):
        letter = chr(value)
        return lambda name: name.starts(letter)
    if kind is op.ANY and not flags & re.DOTALL:
        return lambda name: name.all >> 1 & ~name.starts("\n")
    parts = value if kind is op.IN else [(kind, value)]
    if flags & re.IGNORECASE:
        # `re` folds the characters of a range one by one.
        budget.spend(sum(each[1] - each[0] for what, each in parts if what is op.RANGE))
    source = "." if kind is op.ANY else f"[{''.join(_written(*each) for each in parts)}]"
    compiled = re.compile(source, flags & _OF_CHARACTERS)
    return lambda name: name.where(compiled)


def _written(kind: Any, value: Any) -> str:
    """Return a part of a set of characters as `re` reads it."""
    if kind is op.NEGATE:
        return "^"
    if kind is op.CATEGORY:
        return _CATEGORIES[value]
    if kind is op.NOT_LITERAL:
        return "^" + _letter(value)
    return "-".join(map(_letter, value)) if kind is op.RANGE else _letter(value)


def _letter(code: int) -> str:
    return f"\\U{code:08x}"


def _character(mask: _Mask) -> _Step:
    def run(name: _Name, at: int, back: bool) -> int:
        return at >> 1 & mask(name) if back else (at & mask(name)) << 1

    return run


def _repetition(low: Any, high: Any, items: Sequence[Any], flags: int, budget: Budget) -> _Step:
    step = _sequence(items, flags, budget)
    endless = high is op.MAXREPEAT
    mask = (
        _mask(*items[0], flags, budget) if len(items) == 1 and items[0][0] in _CHARACTERS else None
    )

    def run(name: _Name, at: int, back: bool) -> int:
        for _ in range(low):
            after = step(name, at, back)
            if after == at:
                break
            at = after
        if mask is not None and endless and not back:
            # The sum's carry runs through the characters behind each position.
            fits = mask(name)
            return at | (fits + (at & fits) ^ fits)
        fresh, count = at, 0
        while fresh and (endless or count < high - low):
            fresh = step(name, fresh, back) & ~at
            at |= fresh
            count += 1
        return at

    return run


def _branch(steps: Sequence[_Step]) -> _Step:
    def run(name: _Name, at: int, back: bool) -> int:
        found = 0
        for step in steps:
            found |= step(name, at, back)
        return found

    return run


def _look(step: _Step, ahead: bool, wanted: bool) -> _Step:
    def run(name: _Name, at: int, back: bool) -> int:
        if ahead and not at & (at - 1):
            held = at if step(name, at, False) else 0
        else:
            held = step(name, name.all, ahead)
        return at & held if wanted else at & ~held

    return run


def _place(value: Any, flags: int) -> _Step:
    lines = flags & re.MULTILINE
    word = re.compile(r"\w", flags & re.ASCII)

    def places(name: _Name) -> int:
        end, breaks = 1 << len(name.text), name.starts("\n")
        if value is op.AT_BEGINNING_STRING or value is op.AT_BEGINNING:
            return 1 | (breaks << 1 if lines and value is op.AT_BEGINNING else 0)
        if value is op.AT_END_STRING:
            return end
        if value is op.AT_END:
            return end | (breaks if lines else breaks & end >> 1)
        words = name.where(word)
        bounds = words ^ words << 1
        return bounds if value is op.AT_BOUNDARY else name.all & ~bounds

    return lambda name, at, back: at & places(name)
