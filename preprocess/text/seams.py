"""Finds places where a text may be cut so that its parts encode by themselves.

A byte-level BPE merges within words only, and a regular expression finds the words. Each of its
known alternatives matches certain pairs of adjacent characters. Between two characters that none
of them matches, one word ends whatever follows. Characters stand for classes:

L letters, M marks, N digits, S a space, R a line end, P anything else.

The rule holds where characters mean the same to every version of Unicode. So others than those of
Unicode 3.2 have no class, and there is no seam beside them. Nor is there one before a mark or a
conjoining character, which NFC may join with what stands before.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tokenizers

_log = logging.getLogger(__name__)
_LINE_ENDS = r"\s*[\r\n]+"
_BLANKS = "SS SR RS RR"
_JOINED: Mapping[str, str] = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)": "PL LL",
    r"[^\r\n\p{L}\p{N}]?\p{L}+": "SL PL ML LL",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+": "SL PL SM PM LL LM ML MM",
    r"\p{N}": "",
    r"\p{N}{1,3}": "NN",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*": "SP SM PP PM MP MM PR MR RR",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*": "SP PP PR RR",
    _LINE_ENDS: _BLANKS,
    r"\s+(?!\S)": _BLANKS,
    r"\s+": _BLANKS,
}
"""Alternatives of the known patterns, with the pairs of classes that a match may contain."""
_MOST_PAIRS = 1 << 14
# Most seams lie around such runs, which a search passes quickly.
_CANDIDATES = re.compile(r"\s+|[^\w\s]+|\d+")
# Behind a space nothing is certain: how many spaces a word begins with depends on what follows.
# Behind a line end the run of white space ends, if the pattern takes line ends before spaces.
_BEFORE, _BEHIND = "LNP", "LNPSR"
_CHECK = (
    "It's 12,5 — WE'LL see…\n\n  x\t y ;\r\n'tis a'b <think>1</think> e\u0301a\u0301 "
    "你好，图片。\n在 \u0e17\u0e35\u0e48 \u0915\u093f\u0902, "
    "\u0627\u0644 \U0001f469\u200d\U0001f467! \u1100\u1161."
)


class Seams:
    """Places to cut a text.

    Args:
        pairs: pairs of classes between which a word ends.
        inside: pairs of characters inside tokens that are taken out of a text before it is split.
    """

    def __init__(self, pairs: frozenset[str], inside: frozenset[str] = frozenset()) -> None:
        self._pairs, self._inside = pairs, inside
        self._known: dict[str, bool] = {}

    def next(self, text: str, start: int) -> int | None:
        """Return a seam from `start` on; None if there is none.

        It depends on the text up to the character behind it alone.
        """
        for match in _CANDIDATES.finditer(text, max(start - 1, 0)):
            for at in (match.start(), match.start() + 1, match.end()):
                if max(start, 1) <= at < len(text) and self._is_seam(text[at - 1 : at + 1]):
                    return at
        return None

    def last(self, text: str) -> int:
        """Return the last seam of a text; 0 if there is none."""
        size = 64
        while True:
            start = at = max(len(text) - size, 0)
            last = 0
            while (seam := self.next(text, at + 1)) is not None:
                last = at = seam
            if last or not start:
                return last
            size *= 8

    def _is_seam(self, pair: str) -> bool:
        known = self._known.get(pair)
        if known is None:
            classes = _class_of(pair[0]) + _class_of(pair[1])
            known = classes in self._pairs and pair not in self._inside
            if len(self._known) < _MOST_PAIRS:
                self._known[pair] = known
        return known

    def parts(self, text: str, size: int) -> Iterator[str]:
        """Cut a text at the first seam behind every `size` characters.

        Parts of a text that grows stay as they are, but for the last one.
        """
        at = 0
        while len(text) - at > size and (end := self.next(text, at + size)) is not None:
            yield text[at:end]
            at = end
        yield text[at:]


def find_seams(backend: tokenizers.Tokenizer) -> Seams:
    """Return the seams for a tokenizer; none if it does not split and merge in a known way."""
    pairs = _pairs_of(backend)
    # Added tokens are found first, anywhere in a text; special ones are encoded as text.
    added = [token for token in backend.get_added_tokens_decoder().values() if not token.special]
    if not pairs or any(token.single_word or token.lstrip or token.rstrip for token in added):
        return Seams(frozenset())
    texts = [token.content for token in added]
    inside = (text[at : at + 2] for text in texts for at in range(len(text) - 1))
    seams = Seams(pairs, frozenset(inside))
    whole = backend.encode(_CHECK, add_special_tokens=False).ids
    at = 0
    while (end := seams.next(_CHECK, at + 1)) is not None:
        at = end
        ids = [backend.encode(t, add_special_tokens=False).ids for t in (_CHECK[:at], _CHECK[at:])]
        if ids[0] + ids[1] != whole:
            _log.warning("the tokenizer does not split texts as its pattern says: none is cut")
            return Seams(frozenset())
    return seams


def _pairs_of(backend: tokenizers.Tokenizer) -> frozenset[str]:
    """Return the pairs of classes between which words end, from the parts of a tokenizer."""
    if not isinstance(backend.model, tokenizers.models.BPE) or backend.model.dropout:
        return frozenset()
    if backend.normalizer is not None and _state(backend.normalizer) != {"type": "NFC"}:
        return frozenset()
    splitter = {} if backend.pre_tokenizer is None else _state(backend.pre_tokenizer)
    steps = splitter.get("pretokenizers") or []
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return frozenset()
    split, level = steps
    alone = split.get("behavior") == "Isolated" and not split.get("invert")
    if not alone or level.get("use_regex", True) or level.get("add_prefix_space", True):
        return frozenset()
    return pairs_between(alternatives(str(split["pattern"].get("Regex", ""))))


def _state(part: Any) -> dict[str, Any]:
    """Return a part of a tokenizer as tokenizer.json writes it."""
    try:
        state: dict[str, Any] = json.loads(part.__getstate__())
    except Exception:  # a part made in Python has no such form
        return {}
    return state


def alternatives(pattern: str) -> list[str]:
    """Split a pattern at the bars outside of groups and sets."""
    found, depth, at = [""], 0, 0
    while at < len(pattern):
        taken = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        depth += (taken in ("(", "[")) - (taken in (")", "]"))
        if taken == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += taken
        at += len(taken)
    return found


def pairs_between(choices: Iterable[str]) -> frozenset[str]:
    """Return the pairs of classes that no alternative matches; none if one is not known."""
    choices = list(choices)
    if any(choice not in _JOINED for choice in choices):
        return frozenset()
    joined = {pair for choice in choices for pair in _JOINED[choice].split()}
    first = next((choice for choice in choices if choice.startswith(r"\s")), "")
    before = _BEFORE + "R" * (first == _LINE_ENDS)
    pairs = {a + b for a in before for b in _BEHIND if not (a == "R" and b in "RS")}
    return frozenset(pairs - joined)


def _class_of(character: str) -> str:
    """Return a character's class; "" if it has none that is certain."""
    if character in "\r\n":
        return "R"
    if character == " ":
        return "S"
    kind, old = unicodedata.category(character)[0], unicodedata.ucd_3_2_0.category(character)[0]
    code = ord(character)
    jamo = 0x1100 <= code < 0x1200 or 0xA960 <= code < 0xA980 or 0xD7B0 <= code < 0xD800
    if kind != old or jamo or unicodedata.normalize("NFC", character) != character:
        return ""
    return {"L": "L", "N": "N", "P": "P", "S": "P"}.get(kind, "")
