"""Grammars in EBNF and patterns: what is followed is exactly what they say."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from sweeps import quick

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar import worker
from vlm_serve.grammar.library import Library

SIGNS = "ab<"
SHARE = 40
Part = tuple[Any, ...]
"""("text", "ab"), ("set", "a", negated), ("name", "x"), or ("row" | "choice", parts), or
("repeat", part, least, most)."""


@pytest.fixture(scope="module")
def library() -> Library:
    """Bytes as tokens, and an end."""
    return Library([bytes([each]) for each in range(256)] + [b""], [256])


def matcher(library: Library, kind: str, source: str) -> Any:
    grammar, _ = worker.text_grammar(kind, source, library)
    return library.parsed(grammar)[0]


def takes(found: Any, text: str) -> bool:
    tokens, copy = list(text.encode()), found.deep_copy()
    matches = copy.validate_tokens(tokens) == len(tokens) and copy.consume_tokens(tokens)
    return bool(matches and copy.is_accepting())


def words(most: int) -> Iterator[str]:
    for size in range(most + 1):
        yield from map("".join, itertools.product(SIGNS, repeat=size))


def drawn(draw: random.Random, names: list[str], depth: int = 0) -> Part:
    kind = draw.random()
    if depth > 3 or kind < 0.25:
        return "text", "".join(draw.choices(SIGNS, k=draw.choice([1, 1, 2, 3])))
    if kind < 0.4:
        return "set", draw.choice(["a", "ab", "b<"]), draw.random() < 0.5
    if kind < 0.6:
        return "name", draw.choice(names)
    parts = [drawn(draw, names, depth + 1) for _ in range(draw.randint(2, 3))]
    if kind < 0.88:
        return draw.choice(["row", "row", "choice"]), parts
    return "repeat", parts[0], *draw.choice([(0, None), (1, None), (0, 1), (2, 2), (1, 2), (0, 2)])


def written(part: Part) -> str:
    match part:
        case "text", text:
            return f'"{text}"'
        case "set", signs, negated:
            return f"[{'^' * negated}{signs}]"
        case "name", name:
            return str(name)
        case "row", parts:
            return f"({' '.join(map(written, parts))})"
        case "choice", parts:
            return f"({' | '.join(map(written, parts))})"
        case _, inner, least, most:
            bounds = f"{least},{'' if most is None else most}"
            return f"({written(inner)}){{{bounds}}}"
    raise AssertionError


class Recogniser:
    """Where each rule may end, learned until nothing new is found."""

    def __init__(self, rules: dict[str, Part], text: str) -> None:
        self._text = text
        places = range(len(text) + 1)
        self._ends: dict[tuple[str, int], set[int]] = {
            (name, at): set() for name in rules for at in places
        }
        while any(self._learn(name, at, rules[name]) for name in rules for at in places):
            pass
        self.matches = len(text) in self._ends["root", 0]

    def _learn(self, name: str, at: int, part: Part) -> bool:
        found, known = self._of(part, at), self._ends[name, at]
        self._ends[name, at] = known | found
        return not found <= known

    def _of(self, part: Part, at: int) -> set[int]:
        match part:
            case "text", text:
                return {at + len(text)} if self._text.startswith(text, at) else set()
            case "set", signs, negated:
                sign = self._text[at : at + 1]
                return {at + 1} if sign and (sign in signs) != negated else set()
            case "name", name:
                return self._ends[name, at]
            case "row", parts:
                ends = {at}
                for each in parts:
                    ends = {end for start in ends for end in self._of(each, start)}
                return ends
            case "choice", parts:
                return {end for each in parts for end in self._of(each, at)}
        _, inner, least, most = part
        ends, found = {at}, {at} if not least else set()
        for count in range(1, 1 + (len(self._text) + least if most is None else most)):
            ends = {end for start in ends for end in self._of(inner, start)}
            found |= ends if count >= least else set()
        return found


@pytest.mark.parametrize("start", quick(range(0, 200, SHARE), 1))
def test_random_grammars(library: Library, start: int) -> None:
    """A lexer that takes the longest text must not lose any, see `ebnf`."""
    taken = 0
    for seed in range(start, start + SHARE):
        draw = random.Random(seed)
        names = ["root", "x", "y"][: draw.randint(1, 3)]
        rules: dict[str, Part] = {
            name: ("choice", [drawn(draw, names) for _ in range(3)]) for name in names
        }
        source = "\n".join(f"{name} ::= {written(part)}" for name, part in rules.items())
        try:
            found = matcher(library, "grammar", source)
        except InvalidRequestError as error:
            assert "endless" in error.message or "any text" in error.message, source
            assert not any(Recogniser(rules, word).matches for word in words(2))
            continue
        for word in words(4):
            expected = Recogniser(rules, word).matches
            taken += expected
            assert takes(found, word) == expected, (seed, word, source)
    assert taken > 100


ATOMS = ["a", "ab", "<", ".", "[ab]", "[^a]", r"\w", r"\W", r"\S", r"\x61", r"[^\w]", r"[\Wb]"]


def pattern(draw: random.Random, depth: int = 0) -> str:
    kind = draw.random()
    if depth > 3 or kind < 0.4:
        return draw.choice(ATOMS)
    if kind < 0.65:
        return pattern(draw, depth + 1) + pattern(draw, depth + 1)
    if kind < 0.85:
        return f"(?:{pattern(draw, depth + 1)}|{pattern(draw, depth + 1)})"
    count = draw.choice(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "*?", "{2,}"])
    return f"({pattern(draw, depth + 1)}){count}"


def test_random_patterns(library: Library) -> None:
    for seed in range(60):
        source = pattern(random.Random(seed))
        found, plain = matcher(library, "regex", source), re.compile(source)
        for word in words(4):
            assert takes(found, word) == bool(plain.fullmatch(word)), (seed, word, source)


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("a.b", ["a\nb", "a\u2028b", "aéb"], ["ab"]),
        (r"\s", [" ", "\u00a0", "\n"], ["\u2003", "x"]),
        (r"[^\d]", ["x", "٣", "\n"], ["3"]),
        ("^(?<n>a|b)$", ["a", "b"], ["n", ""]),
        ("a|", ["", "a"], ["|"]),
        ("|".join(f"w{at}" for at in range(300)), ["w0", "w299"], ["w300"]),
    ],
)
def test_patterns(library: Library, source: str, right: list[str], wrong: list[str]) -> None:
    found = matcher(library, "regex", source)
    assert all(takes(found, each) for each in right)
    assert not any(takes(found, each) for each in wrong)


@pytest.mark.parametrize(
    "source", ["(a", "(?=a)b", r"\bfoo", r"(a)\1", r"\cA", "a$b", "*", "a{3}{2}"]
)
def test_refused_patterns(library: Library, source: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be compiled: the regex "):
        matcher(library, "regex", source)


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ('root ::= "a" # a comment | "c"\n | "b"', ["a", "b"], ["c", "ab"]),
        ('# "\nroot\n::=\n"a"\n"b"\n#', ["ab"], ["a"]),
        (r'root ::= "\x41\u0042\U00000043\x1F600"', ["ABC\U0001f600"], ["ABC"]),
        (r'root ::= "\"\\\n\t\'\?\e\0\/"'.replace(r"\/", ""), ["\"\\\n\t'?\x1b\0"], [""]),
        (r"root ::= [\x41-\x43\n\]\-é-ü\^]", ["A", "B", "\n", "]", "-", "í", "^"], ["D", "x", ""]),
        ("root ::= [^a-c]", ["d", "\n", "é"], ["a", "b", ""]),
        ("root ::= [-a] [a-]", ["-a", "a-"], ["b-"]),
        ("root ::= [] | [^]", ["]", "\n"], [""]),
        (
            'root ::= "a"{2} "b"{1,} "c"{0,2} "d"? "e"{ 1 , 2 }',
            ["aabe", "aabbccdee"],
            ["abe"],
        ),
        ('root ::= "" | () "a"{0} ("b")', ["", "b"], ["a", "ab"]),
        ('root ::= root-x.1 | _y\nroot-x.1 ::= "x"\n_y ::= "y"\nnever ::= "n"', ["x", "y"], ["n"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["", "ab"]),
        ('root::="("root")"|""', ["", "(())"], ["(()"]),
        ("root ::= " + "(" * 60 + '"a"' + ")?" * 60, ["", "a"], ["aa"]),
        ("root ::= " + "(" * 60 + '"a" | "b" root' + ")+" * 60, ["a", "ba"], ["b", ""]),
        ('root ::= Token | "x"\nToken ::= "t"', ["t", "x"], [""]),
    ],
)
def test_grammars(library: Library, source: str, right: list[str], wrong: list[str]) -> None:
    found = matcher(library, "grammar", source)
    assert [each for each in right if not takes(found, each)] == []
    assert [each for each in wrong if takes(found, each)] == []


LONG = 'root ::= r0\nr999 ::= "b"' + "".join(f'\nr{at} ::= r{at + 1} "a"' for at in range(999))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('root ::= "a" (= "b") "b"', "line 1: looking ahead"),
        ('root ::= "x"\nx ::= TagDispatch(("<a>", x))', "line 2: TagDispatch cannot"),
        ("root ::= Token(1)", "Token cannot"),
        ("root ::= ExcludeToken(1)", "ExcludeToken cannot"),
        ("root ::= nowhere", "there is no rule 'nowhere'"),
        ('main ::= "a"', "there is no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is there twice"),
        ('root ::= "a', "cannot be read"),
        ('root ::= "a\nb"', "line 1: .*cannot be read"),
        ("root ::= [a", "cannot be read"),
        (r'root ::= "\q"', "no character"),
        (r'root ::= "\ud800"', "no character"),
        (r'root ::= "\U00110000"', "no character"),
        (r"root ::= [\w]", "no character"),
        ("root ::= [z-a]", "ends before it begins"),
        ('root ::= "a"{2,1}', "more than 1 times at least"),
        ('root ::= "a"+?', "needs a rule"),
        ("root ::= | ", "empty before"),
        ('root ::= ("a"', "needs '\\)'"),
        ('root[max_tokens=3] ::= "a"', "needs a rule"),
        ("root ::= root", "satisfied by any text"),
        ('"a"', "needs a rule"),
        ("root ::= " + "(" * 70 + '"a"' + ")" * 70, "deeper than 64"),
        (LONG, "over 512 levels"),
        ('root ::= "a" root', "endless"),
    ],
)  # fmt: skip
def test_refused_grammars(library: Library, source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        matcher(library, "grammar", source)
    assert "\n" not in refused.value.message


def test_a_grammar_is_not_cut_into_characters_without_need(library: Library) -> None:
    """Each of their steps is one of the parser: a mask would take fifty times as long."""
    source = r"""
        root ::= value
        value ::= object | array | string | number
        object ::= "{" ws (string ws ":" ws value ws ("," ws string ws ":" ws value ws)*)? "}"
        array ::= "[" ws (value ws ("," ws value ws)*)? "]"
        string ::= "\"" ([^"\\\r\n] | "\\" [^\n])* "\""
        number ::= "-"? [0-9]+ ("." [0-9]+)?
        ws ::= [ \t\n]*
    """
    grammar, _ = worker.text_grammar("grammar", source, library)
    assert r"/[^\x{22}\x{5c}\x{d}\x{a}]/ | " in grammar, "a string is one terminal"
    found = library.parsed(grammar)[0]
    assert takes(found, '{"a" : [1, {"b":"c\\"}"}], "d":"" }')
    assert not takes(found, '{"a" : [1, {"b":"c\\"}"}], "d":" }')


def tag(content: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": "<a>", "content": content, "end": "</a>", **more}


REGEX = {"type": "regex", "pattern": "[a-z<]*"}
DIGITS = {"type": "grammar", "grammar": "root ::= [0-9]+"}
NESTED = {"type": "grammar", "grammar": 'root ::= "(" root ")" | ""'}
ANY = {"type": "any_text"}


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (REGEX, ["", "ab<"], ["A"]),
        (NESTED, ["", "(())"], ["("]),
        (ANY, ["", "a\nb"], []),
        (tag(REGEX), ["<a>b<</a>", "<a></a>"], ["<a>b", "<a>b</a></a>"]),
        (tag(DIGITS, end=["</a>", "."]), ["<a>12</a>", "<a>3."], ["<a></a>", "<a>3.."]),
        (tag(ANY), ["<a>\n</a>"], ["<a></a>b</a>"]),
        ({"type": "or", "elements": [DIGITS, tag(REGEX)]}, ["12", "<a>b</a>"], ["b", "<a>12</a>"]),
    ],
)
def test_texts_in_structural_tags(
    library: Library, form: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    (grammar, _), _ = worker.tag_grammar({"type": "structural_tag", "format": form}, library)
    found = library.parsed(grammar)[0]
    assert [each for each in right if not takes(found, each)] == []
    assert [each for each in wrong if takes(found, each)] == []


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "sequence", "elements": [REGEX]}, "the format 'sequence' is not supported"),
        ({**ANY, "excludes": ["x"]}, "excludes of the format any_text"),
        ({"type": "json_schema", "json_schema": {}, "style": "glm_xml"}, "the style 'glm_xml'"),
        (tag(NESTED), "a grammar with a recursive rule"),
        (tag({"type": "or", "elements": [DIGITS]}), "the format or cannot stand in a tag"),
        (tag(REGEX, end=""), "a tag has no end"),
        ({"type": "regex", "pattern": "(?=a)"}, "the regex looks ahead"),
        ({"type": "or", "elements": [tag(ANY), tag(ANY, begin="<a>b")]}, "begins with '<a>'"),
        (None, "a format is missing"),
    ],
)
def test_refused_structural_tags(library: Library, form: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        worker.tag_grammar({"type": "structural_tag", "format": form}, library)
