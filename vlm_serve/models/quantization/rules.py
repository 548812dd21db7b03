"""Matching of modules by an entry of a configuration."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vlm_serve.models.patterns import Pattern
from vlm_serve.models.quantization.base import Format

_FRONT = r"(?:model\.|language_model\.)"
_PREFIX = re.compile(rf"^{_FRONT}+")
"""Prefixes of module names that depend on the file's writer."""
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of some modules; None for dense ones.

    Attributes:
        names: whole names, or consecutive words of them: `mlp.gate` is in `layers.0.mlp.gate` and
            not in `layers.0.mlp.gate_proj`, and `visual` is in all modules below it.
        expressions: matched from a name's beginning.
        anchored: whether a name's words must be the first ones, as for a module and all below it.
    """

    format: Format | None
    names: frozenset[str] = frozenset()
    expressions: tuple[Pattern, ...] = ()
    anchored: bool = False

    def fits(self, module: str) -> bool:
        """Return True if it matches a module."""
        runs = _runs(plain_name(module), only_first=self.anchored)
        if self.names and not self.names.isdisjoint(runs):
            return True
        return any(each.match(module) for each in self.expressions)


def rule(entries: Iterable[str], format_: Format | None) -> Rule:
    """Return a rule by names; entries that cannot be names are expressions.

    Raises:
        CheckpointError: an entry is neither.
    """
    entries = list(entries)
    names = frozenset(plain_name(each) or each for each in entries if _NAME.fullmatch(each))
    odd = [each for each in entries if not _NAME.fullmatch(each)]
    return Rule(format_, names, tuple(expression(each, "(?:", r")(?:\.|$)") for each in odd))


def expression(text: str, before: str = "", behind: str = "") -> Pattern:
    """Return a regular expression of a configuration, with expressions around it.

    Raises CheckpointError.
    """
    return Pattern(text, "quantization_config", before, behind)


def wildcard(text: str) -> Pattern:
    """Return the expression for whole names in which stars match any number of words.

    Raises CheckpointError.
    """
    return expression(f"{_FRONT}*{fnmatch.translate(plain_name(text))}")


def plain_name(name: str) -> str:
    """Return a name without the prefixes that depend on the file's writer."""
    return _PREFIX.sub("", name)


def _runs(module: str, *, only_first: bool) -> Iterator[str]:
    words = module.split(".")
    for first in range(1 if only_first else len(words)):
        for last in range(first + 1, len(words) + 1):
            yield ".".join(words[first:last])
