"""From a request's form to a grammar of llguidance that was tried.

It runs in the compiling process, within its limits.
"""

from __future__ import annotations

import json
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.ebnf import read
from vlm_serve.grammar.lark import Lark, constant, either
from vlm_serve.grammar.lengths import Lengths
from vlm_serve.grammar.lexing import exact
from vlm_serve.grammar.library import UNSATISFIABLE, Library, sentence
from vlm_serve.grammar.references import refuse
from vlm_serve.grammar.rewriting import children, rewrite
from vlm_serve.grammar.tags import Tags, regex

_LOCATING = 200
"""Subschemas compiled to find the one that fails."""


Built = tuple[str, int]
"""A grammar, and the bytes of memory that it takes."""


def json_grammar(schema: Any, library: Library, *, strict: bool = False) -> Built:
    """Build the grammar of a schema.

    Raises:
        InvalidRequestError: it cannot be enforced. The message names the path.
    """
    whole = rewrite(schema, strict=strict)
    if whole is False:
        raise _located(schema, UNSATISFIABLE, library)
    grammar = library.json(whole)
    error, size = library.tried(grammar)
    if error:
        raise _located(schema, error, library)
    return grammar, size


def tag_grammar(tag: Any, library: Library) -> tuple[Built, Lengths]:
    """Build the grammar of a structural tag. Return the bounds left out of it as well.

    Raises:
        InvalidRequestError: it cannot be enforced. The message names the path in a schema.
    """
    tags = Tags(library)
    grammar = library.lark(tags.grammar(tag))
    error, size = library.tried(grammar)
    if not error:
        return (grammar, size), tags.lengths
    for source in tags.sources:
        found = _error(rewrite(source.schema), library)
        if found:
            raise source.error(_located(source.schema, found, library))
    if len(tags.sources) == 1:
        raise tags.sources[0].error(refuse("#", sentence(error)))
    raise InvalidRequestError(f"the grammar {sentence(error)}")


def text_grammar(kind: str, source: str, library: Library) -> Built:
    """Build the grammar of a regex, a choice or a grammar in EBNF.

    Raises:
        InvalidRequestError: it is invalid or cannot be enforced.
    """
    lark = Lark()
    if kind == "grammar":
        rule = exact(read(source), lark, library.has_text)
    elif kind == "regex":
        rule = lark.terminal(regex(source))
    else:
        rule = lark.terminal(either([constant(text) for text in json.loads(source)]))
    grammar = library.lark(lark.text(rule))
    error, size = library.tried(grammar)
    if error:
        raise InvalidRequestError(f"the grammar cannot be compiled: the {kind} {sentence(error)}")
    return grammar, size


def _error(schema: Any, library: Library) -> str:
    """Return why a rewritten schema cannot be followed from its start on; empty: it can."""
    return UNSATISFIABLE if schema is False else library.tried(library.json(schema))[0]


def _located(schema: Any, error: str, library: Library) -> InvalidRequestError:
    """Return the error about the innermost subschema that fails by itself."""
    place, left = "#", _LOCATING
    searching = True
    while searching:
        searching = False
        for child in children(schema, place):
            left -= 1
            if left < 0:
                return refuse(place, sentence(error))
            try:
                part = rewrite(schema, pointer=child)
            except InvalidRequestError:
                continue
            found = _error(part, library)
            # A property that nothing fits may be absent.
            if found and not (UNSATISFIABLE in found and UNSATISFIABLE not in error):
                place, error, searching = child, found, True
                break
    return refuse(place, sentence(error))
