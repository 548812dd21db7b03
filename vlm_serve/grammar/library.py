"""llguidance: grammars of one tokenizer, with limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from vlm_serve.grammar.lark import OPTIONS
from vlm_serve.grammar.lengths import TokenTexts
from vlm_serve.system.host_memory import allocated_bytes

MAX_LEXER_STATES = 50_000
MAX_ITEMS = 20_000
"""Places in the grammar at which one text may be: an object may have thousands of properties."""
UNSATISFIABLE = "Unsatisfiable"
"""How the errors begin about schemas that no value fits."""
_FORCED_STEPS = 8
_OVER_A_LIMIT = ("LexerTooComplex", "ParserTooComplex")
_CANNOT = "cannot be enforced"
_TOO_LARGE = f"{_CANNOT}: it needs more than the limits allow; use fewer or smaller repetitions"
_SENTENCES = (
    ("oneOf", "has a oneOf whose alternatives may overlap; use anyOf, or a property with a const"),
    ("circular references", f"combines a recursive $ref with other keywords, which {_CANNOT}"),
    ("intersection", "nests too many combinations of schemas"),
    ("schema too large", "nests too many combinations of schemas"),
    ("min/maxProperties", "limits the number of properties of which some are optional"),
    ("ff_tokens", f"{_CANNOT}: the text that it begins with in any case is endless or too long"),
    ("NoExtension", "cannot be satisfied by any text"),
    ("Too many items", _TOO_LARGE),
    ("too many", _TOO_LARGE),
    ("too big", _TOO_LARGE),
    ("fuel", _TOO_LARGE),
    ("Current row", _TOO_LARGE),
    (
        "if regex is empty",
        f"{_CANNOT}: whether a text has the patterns and the length is too much work to find out; "
        "use a smaller length, or leave one out",
    ),
)
"""Marks of llguidance's words, and what they mean."""
_LIMITS = (
    (
        "too many states",
        f"following the grammar needs more than {MAX_LEXER_STATES} states of its lexer; use "
        "smaller lengths and repetitions",
    ),
    (
        "too many expressions",
        "the next token needs more work of the grammar's lexer than its limit allows; use smaller "
        "repetitions, or fewer patterns and lengths for one text",
    ),
)
_ANY_LIMIT = (
    f"the answer fits the grammar at more than {MAX_ITEMS} places at once; use fewer alternatives "
    "and nested repetitions"
)
"""What is said when a limit is reached while an answer is followed."""


class Library:
    """Compiles grammars for one tokenizer. Thread-safe.

    Args:
        texts: the bytes of each token; b"": it never matches.
        ends: end-of-answer tokens.
        encode: returns the tokens of a text; None: any tokens with these bytes will do.
    """

    def __init__(
        self,
        texts: list[bytes],
        ends: Sequence[int],
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        import llguidance

        self._library = llguidance
        ends = [token for token in ends if token < len(texts)]
        self.ends = frozenset(ends)
        self._texts = texts
        vocabulary = _Vocabulary(texts, ends)
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), n_vocab=len(texts), eos_token=ends[0]
        )
        vocabulary.encode = encode or self.tokenizer.greedy_tokenize
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, max_items_in_row=MAX_ITEMS, verbose_errors=False
        )

    @cached_property
    def token_texts(self) -> TokenTexts:
        """What the tokens add to a counted text. The first use takes up to a second."""
        return TokenTexts(self._texts)

    def json(self, schema: Any) -> str:
        """Return the grammar of a rewritten schema in the library's own form."""
        text = json.dumps({} if schema is True else schema)
        grammar: str = self._library.LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS)
        return grammar

    def lark(self, text: str) -> str:
        """Return a grammar written in Lark in the library's own form."""
        grammar: str = self._library.LLMatcher.grammar_from_lark(text)
        return grammar

    def parsed(self, grammar: str) -> tuple[Any, str]:
        """Return a matcher at a grammar's start and its error, which is empty if there is none."""
        matcher = self._library.LLMatcher(self.tokenizer, grammar, log_level=0, limits=self._limits)
        return matcher, matcher.get_error()

    def tried(self, grammar: str) -> tuple[str, int]:
        """Parse a grammar and follow it as far as it leaves no choice.

        Return the error, which is empty if there is none, and the bytes of memory that it takes.
        """
        before = allocated_bytes()
        matcher, error = self.parsed(grammar)
        for _ in range(_FORCED_STEPS):
            if error or matcher.is_stopped():
                break
            matcher.compute_bitmask()
            forced = matcher.compute_ff_bytes()
            if forced:
                text = forced.decode(errors="ignore")
                matcher.consume_tokens(self.tokenizer.greedy_tokenize(text))
            error = matcher.get_error() if matcher.is_error() else ""
            if not forced:
                break
        return error, allocated_bytes() - before

    def has_text(self, terminal: str) -> bool:
        """Return True if a grammar of one terminal matches some text, or is over a limit."""
        matcher, error = self.parsed(self.lark(terminal))
        if error:
            return True
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for token in self.ends:
            mask &= ~(1 << token)
        return bool(mask) or matcher.is_accepting() or matcher.stop_reason() in _OVER_A_LIMIT

    def json_error(self, schema: Any) -> str:
        """Return why no JSON can follow a rewritten schema; empty: it can."""
        return UNSATISFIABLE if schema is False else self.parsed(self.json(schema))[1]


class _Vocabulary:
    """The tokens, as llguidance asks for them."""

    def __init__(self, texts: list[bytes], ends: Sequence[int]) -> None:
        self.encode: Callable[[str], list[int]] | None = None
        self.tokens = texts
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = list(ends)

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return [] if self.encode is None else self.encode(whole)


def is_of_lexer(error: str) -> bool:
    """Return True if llguidance's words are about a limit of its lexer."""
    return "lexer error" in error


def limit(error: str) -> str:
    """Return a sentence for llguidance's words about a limit reached while following a grammar."""
    return next((words for mark, words in _LIMITS if mark in error), _ANY_LIMIT)


def sentence(error: str) -> str:
    """Return a sentence for llguidance's words."""
    line = error.strip().split("failed to compile JSON schema: ")[-1].splitlines()[0]
    if line.startswith(UNSATISFIABLE):
        why = line.partition(":")[2].strip()[:200]
        return "cannot be satisfied by any value" + (f": {why}" if why else "")
    return next((words for mark, words in _SENTENCES if mark in line), f"{_CANNOT}: {line[:300]}")
