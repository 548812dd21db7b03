"""Which modules a line of a configuration means."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vlm_serve.errors import CheckpointError
from vlm_serve.models.quantization.base import Format

_FRONT = r"(?:model\.|language_model\.)"
_PREFIX = re.compile(rf"^{_FRONT}+")
"""What the same module's name begins with depends on who wrote the file."""
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of some modules; None for dense ones.

    Attributes:
        names: whole names, or consecutive words of them: `mlp.gate` is in `layers.0.mlp.gate` and
            not in `layers.0.mlp.gate_proj`, and `visual` is in all modules below it.
        expressions: that match a name from its beginning.
        anchored: whether a name's words must be the first ones, as of a module and all below it.
    """

    format: Format | None
    names: frozenset[str] = frozenset()
    expressions: tuple[re.Pattern[str], ...] = ()
    anchored: bool = False

    def fits(self, module: str) -> bool:
        """Whether it is about a module."""
        runs = _runs(plain_name(module), only_first=self.anchored)
        if self.names and not self.names.isdisjoint(runs):
            return True
        return any(each.match(module) for each in self.expressions)


def rule(entries: Iterable[str], format_: Format | None) -> Rule:
    """By names; what cannot be one is an expression.

    Raises:
        CheckpointError: an entry is neither.
    """
    entries = list(entries)
    names = frozenset(plain_name(each) or each for each in entries if _NAME.fullmatch(each))
    odd = [each for each in entries if not _NAME.fullmatch(each)]
    return Rule(format_, names, tuple(expression(rf"(?:{each})(?:\.|$)") for each in odd))


def expression(text: str) -> re.Pattern[str]:
    """A regular expression of a configuration. Raises CheckpointError."""
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(
            f"{text!r} in quantization_config is no regular expression: {error}"
        ) from None


def wildcard(text: str) -> re.Pattern[str]:
    """The expression of whole names whose stars stand for any number of words."""
    return expression(f"{_FRONT}*{fnmatch.translate(plain_name(text))}")


def plain_name(name: str) -> str:
    """A name without what differs with who wrote the file."""
    return _PREFIX.sub("", name)


def _runs(module: str, *, only_first: bool) -> Iterator[str]:
    words = module.split(".")
    for first in range(1 if only_first else len(words)):
        for last in range(first + 1, len(words) + 1):
            yield ".".join(words[first:last])
