"""Tables of cases of which `make test` runs a few and `make test-all` the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

MARKS = ("browser", "fuzz", "interpreter", "memory", "processes", "processors", "ray", "sweep")
"""What `make test` leaves to `make test-all`; pyproject.toml says what may carry each mark."""


def is_slow(item: pytest.Item) -> bool:
    """Tell whether `make test` leaves a test out."""
    return any(item.get_closest_marker(name) for name in MARKS)


def quick(
    cases: Iterable[Any],
    chosen: int | Collection[Any] | Callable[[Any], bool],
    mark: pytest.MarkDecorator = pytest.mark.sweep,
    *,
    several: bool = False,
) -> list[Any]:
    """Return all cases as parameters, with a mark on those that `make test` leaves out.

    Args:
        cases: values of one argument, or tuples of values of several.
        chosen: the cases that stay in `make test`: their number if they come first, the cases
            themselves, or a function that returns True for them.
        mark: the mark of the others.
        several: each case is a tuple with a value for each of several arguments.
    """
    params = []
    for index, case in enumerate(cases):
        if isinstance(chosen, int):
            stays = index < chosen
        else:
            stays = chosen(case) if callable(chosen) else case in chosen
        values = case if several else (case,)
        params.append(pytest.param(*values, marks=() if stays else mark))
    return params
