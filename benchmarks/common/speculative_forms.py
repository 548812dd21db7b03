"""Answers that repeat something: a grammar forces their form, and the model fills it.

A random model says nothing twice. Held to a form it repeats what the form repeats, as a trained
one does that fills in records; what it may choose, it chooses by its own logits. A bias for longer
tokens makes it write words in the tokens that their text is read in, as trained models do. Words to
choose from are one token each and equally long: among them the bias leaves the choice to the model.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, cycle
from pathlib import Path

from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.structured_outputs import StructuredOutputs

Parts = list[str | tuple[str, ...]]
_COLOURS = ("orange", "purple", "yellow")
_THINGS = ("circle", "square", "street")
_PLACES = ("bottom", "corner", "middle")
_WORDS = (
    (*_COLOURS, *_THINGS, *_PLACES),
    ("black", "green", "house", "right", "river", "video", "white"),
    ("blue", "grey", "left", "long"),
    ("cat", "red", "top"),
)
_DIGITS = tuple("0123456789")
_PIECE = 900
_BIAS = 9.0
"""For every byte of a token: more than a random model's logits differ."""


@dataclass(frozen=True)
class Form:
    """What an answer looks like.

    Attributes:
        parts: texts that are given, and those of which one is chosen.
        source: text that stands in the prompt, and that the answer mostly is; may be empty.
    """

    parts: Parts
    source: str = ""

    def grammar(self) -> str:
        """In the EBNF that vlm-serve and llama.cpp share."""
        words = [
            _quoted(part) if isinstance(part, str) else f"({' | '.join(map(_quoted, part))})"
            for part in self.parts
        ]
        return f"root ::= {' '.join(words)}"

    def tokens(self, encode: Callable[[str], list[int]]) -> list[int]:
        """Those that its texts are read in."""
        draw, found = random.Random(0), set[int]()
        for _ in range(40):
            whole = "".join(
                each if isinstance(each, str) else draw.choice(each) for each in self.parts
            )
            found.update(encode(whole))
        return sorted(found)

    def known(self, pieces: Sequence[str], most: int) -> int:
        """Steps after the first token of an answer in so many pieces of text, if all that the form
        tells is drafted, `most` tokens in a step at most, and its choices are guessed blindly."""
        draw = random.Random("".join(pieces))
        wrong = {place for place, options in self.places(pieces) if draw.randrange(options)}
        steps, place = 0, 1
        while place < len(pieces):
            last = min(place + most - 1, len(pieces) - 1)
            place = 1 + next((each for each in range(place, last) if each in wrong), last)
            steps += 1
        return steps

    def places(self, pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Of an answer's parts: the token that each begins in, and among how many it is chosen."""
        text, ends, at = "".join(pieces), list(accumulate(map(len, pieces))), 0
        for part in self.parts:
            options = (part,) if isinstance(part, str) else part
            right = next(each for each in options if each.startswith(text[at : at + len(each)]))
            yield bisect_right(ends, at), len(options)
            at += len(right)
            if at >= len(text):
                return

    def params(self, tokenizer: Tokenizer, max_tokens: int) -> SamplingParams:
        """A greedy answer of this form."""
        tokens = self.tokens(tokenizer.encode_plain)
        return SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            structured_outputs=StructuredOutputs(grammar=self.grammar()),
            logit_bias={
                token: min(100.0, _BIAS * len(tokenizer.token_bytes(token))) for token in tokens
            },
        )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _spaced(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f" {word}" for word in words)


def records(seed: int) -> Form:
    """Lines of JSON with the same keys."""
    del seed
    line: Parts = ['{"shape": "', _THINGS, '", "near": "', _THINGS, '", "place": "', _PLACES]
    line += ['", "age": ', _DIGITS, _DIGITS, ', "active": ', _DIGITS[:2], "}\n"]
    return Form(line * 8)


def copy(seed: int) -> Form:
    """A page as read by a machine: every tenth word might be another one than in the prompt."""
    draw = random.Random(seed)
    source, parts = "", Parts()
    for place in range(130):
        word, other = draw.sample(_spaced(draw.choice(_WORDS)), 2)
        parts.append((word, other) if place % 10 == 9 else word)
        source += word
    return Form(parts, source)


def answers(seed: int) -> Form:
    """What a batch asks of every video, answered in a fixed form."""
    del seed
    parts: Parts = ['{"main object": "the', _spaced(_COLOURS), _spaced(_THINGS)]
    parts += ['", "where": "in the', _spaced(_PLACES)]
    parts += [' of the picture", "how many": ', _DIGITS, ', "moves": ', _DIGITS[:2]]
    parts += [', "seconds": ', _DIGITS, ".", _DIGITS, ', "then": "it goes to the', _spaced(_PLACES)]
    parts += [" and a", _spaced(_THINGS), ' comes into the background", "certain": ', _DIGITS, "}"]
    return Form(parts)


@cache
def _written() -> Iterator[str]:
    """Pieces of what a person has written for this project, one after the other."""
    root = Path(__file__).resolve().parents[2]
    files = sorted([*root.glob("docs/*.md"), *root.glob("*.md"), *root.glob("benchmarks/**/*.md")])
    lines = [line for path in files for line in path.read_text().splitlines()]
    text = " ".join(line for line in lines if line[:1].isalpha() and "|" not in line)
    text = text.encode("ascii", "ignore").decode()
    return cycle([text[first : first + _PIECE] for first in range(0, len(text) - _PIECE, _PIECE)])


def prose(seed: int) -> Form:
    """A person's text, another one at every call: words come again, but hardly what follows."""
    del seed
    return Form([next(_written())])


FORMS: dict[str, Callable[[int], Form]] = {
    "JSON records": records,
    "copies": copy,
    "video answers": answers,
    "prose": prose,
}
"""By the name of a kind of answers; the number makes one of them another."""
