"""Text that means nothing: names, sentences and long instructions, for copies and distraction.

Words come from `words.txt`, the most frequent ones of technical English first. Every fifth word is
kept for held-out questions.
"""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path

HELD_OUT = 5
"""One word in so many is never trained on as a part of a name."""
SYLLABLES = (
    *("ba", "be", "bo", "da", "de", "do", "fa", "fi", "ga", "ka", "ki", "la", "le", "li", "lo"),
    *("ma", "me", "mi", "mo", "na", "ne", "no", "pa", "pe", "ra", "re", "ri", "ro", "sa", "se"),
    *("ta", "te", "ti", "to", "va", "ve", "vi", "za", "zo", "lan", "mar", "ton", "ber", "sha"),
)


CONSONANTS, VOWELS = (
    "bcdfghjklmnpqrstvwz",
    ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ia", "ee"),
)


@functools.cache
def words() -> tuple[str, ...]:
    """Return the words, the most frequent first."""
    return tuple(Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split())


@functools.cache
def _chances() -> tuple[float, ...]:
    return tuple(itertools.accumulate(1 / (rank + 12) for rank in range(len(words()))))


def frequent_word(rng: random.Random) -> str:
    """Return a word as often as text has it."""
    return rng.choices(words(), cum_weights=_chances())[0]


def rare_word(rng: random.Random, split: str) -> str:
    """Return any word, from those of "train" or of "test"."""
    while True:
        number = rng.randrange(len(words()))
        if (number % HELD_OUT == 0) == (split == "test") and len(words()[number]) > 2:
            return words()[number]


def prose(rng: random.Random, count: int) -> str:
    """Return sentences of `count` words together."""
    out: list[str] = []
    start = True
    for left in range(count, 0, -1):
        word = frequent_word(rng)
        if rng.random() < 0.02:
            word = str(rng.randrange(10 ** rng.randint(1, 4)))
        elif rng.random() < 0.02:
            word = f"`{identifier(rng, 'train')}`"
        end = rng.random() < 0.09 or left == 1
        mark = "." if end else "," if rng.random() < 0.06 else ""
        out.append((word.capitalize() if start else word) + mark)
        start = end
    return " ".join(out)


def capital_name(rng: random.Random) -> str:
    """Return an invented name, such as "Marelo", or another word with a capital."""
    style = rng.random()
    if style < 0.5:
        return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))).capitalize()
    if style < 0.75:
        return rare_word(rng, "train").capitalize()
    pairs = [rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 3))]
    last: str = rng.choice(("", *CONSONANTS))
    return ("".join(pairs) + last).capitalize()


def identifier(rng: random.Random, split: str) -> str:
    """Return an invented name of a field or function, such as `due_date` or `dueDate`."""
    parts = [rare_word(rng, split) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
    if rng.random() < 0.15:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return "_".join(parts)


def instructions(rng: random.Random, count: int) -> str:
    """Return a long text of about `count` words, as agents send: headings, lists, code, JSON."""
    blocks: list[str] = []
    while count > 0:
        size = min(count, rng.randint(15, 60))
        count -= size
        style = rng.random()
        if style < 0.15:
            blocks.append(f"{'#' * rng.randint(1, 3)} {prose(rng, 4)[:-1]}\n\n{prose(rng, size)}")
        elif style < 0.35:
            mark = rng.choice(("- ", "* ", "1. "))
            lines = [mark + prose(rng, rng.randint(4, 12)) for _ in range(max(1, size // 8))]
            blocks.append("\n".join(lines))
        elif style < 0.45:
            name, key = identifier(rng, "train"), identifier(rng, "train")
            code = f'{name} = {key}("{prose(rng, 3)}", {rng.randrange(100)})\nprint({name})'
            blocks.append(f"```python\n{code}\n```")
        elif style < 0.55:
            pairs = [f'"{identifier(rng, "train")}": "{prose(rng, 4)}"' for _ in range(size // 8)]
            blocks.append("{" + ", ".join(pairs) + "}")
        else:
            blocks.append(prose(rng, size))
    return "\n\n".join(blocks)
