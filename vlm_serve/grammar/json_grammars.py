"""Grammars of JSON schemas, compiled and followed by llguidance."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.rewriting import children, rewrite
from vlm_serve.preprocess.tokenizer import Tokenizer

MAX_LEXER_STATES = 50_000
_LOCATING = 200
"""Subschemas that are compiled to find the one that fails."""
# White space is fixed: small models would emit it forever.
_OPTIONS: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_BYTES_PER_BYTE = 24
_LEAST_BYTES = 64 << 10


class JsonGrammars:
    """Compiles schemas for one tokenizer. Thread-safe.

    Args:
        tokenizer: of the model.
        texts: the bytes of each token; b"": it never matches.
        ends: end-of-answer tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: list[bytes], ends: Sequence[int]) -> None:
        import llguidance

        self._library = llguidance
        ends = [token for token in ends if token < len(texts)]
        self._ends = frozenset(ends)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, texts, ends)),
            n_vocab=len(texts),
            eos_token=ends[0],
        )
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )

    def compile(self, source: str, *, strict: bool) -> tuple[Any, int]:
        """Return the compiled grammar of a schema and the memory that it is counted as.

        Raises:
            InvalidRequestError: it cannot be enforced. The message names the path.
        """
        schema = json.loads(source)
        compiled, error = self._compiled(rewrite(schema, strict=strict))
        if error:
            place, error = self._locate(schema, error)
            raise InvalidRequestError(f"the JSON schema cannot be used: {place} {_sentence(error)}")
        return compiled, max(_LEAST_BYTES, _BYTES_PER_BYTE * len(source)) + sys.getsizeof(source)

    def matcher(self, compiled: Any) -> JsonMatcher:
        """Return a matcher at the grammar's start."""
        return JsonMatcher(compiled.deep_copy(), self._tokenizer, self._ends)

    def _compiled(self, schema: Any) -> tuple[Any, str]:
        """Return a compiled grammar and its error, which is empty if there is none."""
        if schema is False:
            return None, "Unsatisfiable schema"
        text = json.dumps({} if schema is True else schema)
        grammar = self._library.LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
        found = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        return found, found.get_error()

    def _locate(self, schema: Any, error: str) -> tuple[str, str]:
        """Return the place of the innermost subschema that fails by itself, and its error."""
        place, left = "#", _LOCATING
        searching = True
        while searching:
            searching = False
            for child in children(schema, place):
                left -= 1
                if left < 0:
                    return place, error
                try:
                    found = self._compiled(rewrite(schema, pointer=child))[1]
                except InvalidRequestError:
                    continue
                # A property that nothing fits may be absent.
                if found and not ("Unsatisfiable" in found and "Unsatisfiable" not in error):
                    place, error, searching = child, found, True
                    break
        return place, error


class JsonMatcher:
    """Follows one answer, with the methods of xgrammar's matcher.

    Args:
        matcher: llguidance's, at its start.
        tokenizer: llguidance's.
        ends: end-of-answer tokens.
    """

    def __init__(self, matcher: Any, tokenizer: Any, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._ends = ends
        self._steps: list[int] = []  # tokens of each step; 0: the end
        self._ended = False

    def is_terminated(self) -> bool:
        """Return True after an end-of-answer token."""
        return self._ended

    def accept_token(self, token: int) -> bool:
        """Advance by a token; return False if it does not match."""
        if self._ended:
            return False
        if token in self._ends:
            self._ended = bool(self._matcher.is_accepting())
            if self._ended:
                self._steps.append(0)
            return self._ended
        return self._consume([token])

    def accept_string(self, data: bytes) -> bool:
        """Advance by bytes, as one step."""
        return not self._ended and self._consume(self._tokenizer.tokenize_bytes(data))

    def _consume(self, tokens: list[int]) -> bool:
        # A token that does not match would leave the matcher in an error for good.
        if not tokens or self._matcher.validate_tokens(tokens) < len(tokens):
            return False
        self._steps.append(len(tokens))
        return bool(self._matcher.consume_tokens(tokens))

    def rollback(self, steps: int) -> None:
        """Go back by a number of steps."""
        taken = self._steps[len(self._steps) - steps :]
        del self._steps[len(self._steps) - steps :]
        self._ended = False
        if count := sum(taken):
            self._matcher.rollback(count)

    def fill_next_token_bitmask(self, words: npt.NDArray[np.int32]) -> bool:
        """Write the mask of the allowed tokens; return True since it restricts them."""
        if self._matcher.is_stopped():
            words[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        # The library knows one end alone.
        bits = words.view(np.uint8)[0]
        for token in self._ends if self._matcher.is_accepting() else ():
            bits[token // 8] |= 1 << token % 8
        return True


class _Vocabulary:
    """The tokens, as llguidance asks for them."""

    def __init__(self, tokenizer: Tokenizer, texts: list[bytes], ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = texts
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = list(ends)

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode_plain(whole)


def _sentence(error: str) -> str:
    """Return a sentence for llguidance's words."""
    line = error.strip().splitlines()[0]
    text = line[:300]
    if line.startswith("Unsatisfiable"):
        why = line.partition(":")[2].strip()[:200]
        return "cannot be satisfied by any value" + (f": {why}" if why else "")
    if "oneOf" in line:
        return "has a oneOf whose alternatives may overlap; use anyOf, or a property with a const"
    if "circular references" in line:
        return "combines a recursive $ref with other keywords, which cannot be enforced"
    if "intersection" in line:
        return "nests too many combinations of schemas"
    if "min/maxProperties" in line:
        return "limits the number of properties of which some are optional"
    return f"cannot be enforced: {text}"
