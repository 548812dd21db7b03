"""How many tokens a step makes with suffix drafts, on texts alone: no model runs, nothing is timed.

    python benchmarks/suffix_drafts.py [checkpoint] [--answers 40] [--drafts 7] [--why]

Texts are those of `speculative_forms.py` with random choices, pages with words left out, put in and
exchanged here and there, sentences that share words, and sentences again, in the tokens of a
checkpoint. Every answer is followed token by token: a step
drafts, and what holds is skipped. Known: steps that draft all that a form tells, and guess its
choices blindly. With `--why` a second table says how steps ended: with all drafts that it may have,
at a choice of the form, at a token that the form tells, behind fewer drafts, and without any.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence as Tokens
from types import SimpleNamespace
from typing import NamedTuple, cast

import engine_cases  # noqa: F401  # First: it says where the tests' modules are.
from checkpoint_parts import sample_text
from speculative_forms import FORMS, Form, copy
from tokenizers import Tokenizer

from vlm_serve.engine.build import find_checkpoint
from vlm_serve.engine.drafts.base import Drafter
from vlm_serve.engine.drafts.suffix import SuffixDrafter
from vlm_serve.engine.sequence import Sequence

Text = tuple[str, str, Form | None]
"""A prompt, its answer, and the form of that."""


def texts(kind: str, count: int) -> list[Text]:
    """So many of one kind."""
    draw = random.Random(kind)
    if kind in FORMS:
        forms = [FORMS[kind](index) for index in range(count)]
        return [
            (
                f"{form.source}\nAnswer:",
                "".join(p if isinstance(p, str) else draw.choice(p) for p in form.parts),
                form,
            )
            for form in forms
        ]
    if kind == "corrections":
        pages = [copy(index).source for index in range(count)]
        return [(f"{page}\nAnswer:", corrected(page, draw), None) for page in pages]
    sentences = list(sample_text(8 * count, 5))
    found = [
        (f"Tell me number {i}.\nAnswer:", " ".join(sentences[8 * i : 8 * i + 8]), None)
        for i in range(count)
    ]
    return found if kind == "sentences" else 2 * found[: count // 2]


def corrected(page: str, draw: random.Random) -> str:
    """A page, about every twelfth word of which is left out, another one, or has one before it."""
    words = page.split(" ")[1:]
    for place in range(draw.randrange(12), len(words), 12):
        other = draw.choice(words)
        words[place] = draw.choice(("", other, f"{other} {words[place]}"))
    return "".join(f" {word}" for word in " ".join(words).split())


class Step(NamedTuple):
    """Its first token in the answer, the drafts for it, those that held, and as many as may be."""

    at: int
    made: int
    held: int
    room: int

    def ended(self, choices: set[int]) -> str:
        """How, if a form has choices at these tokens."""
        if self.held == self.room:
            return "all held"
        if self.held == self.made:
            return "fewer drafts" if self.made else "no drafts"
        return "a choice" if self.at + self.held in choices else "elsewhere"


ENDINGS = ("all held", "a choice", "elsewhere", "fewer drafts", "no drafts")


def steps(drafter: Drafter, prompt: list[int], answer: list[int], most: int) -> list[Step]:
    """Those that an answer takes behind its first token."""
    known = SimpleNamespace(
        number=0,
        prompt=prompt,
        info=SimpleNamespace(token_ids=tuple(prompt)),
        token_ids=[*prompt, *answer[:1]],
        generated=answer,
        request=SimpleNamespace(prediction=(), cold=False),
        keys=SimpleNamespace(root=b""),
    )
    sequence = cast(Sequence, known)
    made, at = list[Step](), 1
    while at < len(answer):
        room = min(most, len(answer) - at - 1)
        drafts: Tokens[int] = drafter.propose(sequence, room)
        held = 0
        while held < len(drafts) and drafts[held] == answer[at + held]:
            held += 1
        known.token_ids += answer[at : at + held + 1]
        made.append(Step(at, len(drafts), held, room))
        at += held + 1
    drafter.forget(sequence)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", nargs="?", default="demo", help="whose tokens (demo)")
    parser.add_argument("--answers", type=int, default=40, help="of each kind")
    parser.add_argument("--drafts", type=int, default=7, help="in a step, at most")
    parser.add_argument("--why", action="store_true", help="also how steps ended")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(find_checkpoint(options.checkpoint) / "tokenizer.json"))
    print("| answers | tokens | tokens a step | drafts that held | known |")
    print("|---|---|---|---|---|")
    endings = dict[str, Counter[str]]()
    for kind in (*FORMS, "corrections", "sentences", "again"):
        endings[kind] = Counter()
        drafter, total, tokens, drafted, known = SuffixDrafter(), 0, 0, 0, 0
        for prompt, answer, form in texts(kind, options.answers):
            encoded = tokenizer.encode(answer, add_special_tokens=False)
            ids = encoded.ids
            choices = set[int]()
            if form is not None:
                pieces = [answer[first:last] for first, last in encoded.offsets]
                known += 1 + form.known(pieces, options.drafts + 1)
                choices = {place for place, among in form.places(pieces) if among > 1}
            asked = tokenizer.encode(prompt, add_special_tokens=False).ids
            made = steps(drafter, asked, ids, options.drafts)
            endings[kind].update(step.ended(choices) for step in made)
            total, tokens = total + 1 + len(made), tokens + len(ids)
            drafted += sum(step.made for step in made)
        held = (tokens - total) / max(1, drafted)
        best = f"{tokens / known:.2f}" if known else ""
        print(f"| {kind} | {tokens} | {tokens / total:.2f} | {100 * held:.0f} % | {best} |")
    if options.why:
        print(f"\n| steps | {' | '.join(ENDINGS)} |")
        print("|---|" + "---|" * len(ENDINGS))
        for kind, counts in endings.items():
            print(f"| {kind} | {' | '.join(str(counts[each]) for each in ENDINGS)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
