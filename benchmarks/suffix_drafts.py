"""How many tokens a step makes with suffix drafts, on texts alone: no model runs, nothing is timed.

    python benchmarks/suffix_drafts.py [checkpoint] [--answers 40] [--drafts 7]

Texts are those of `speculative_forms.py` with random choices, pages with words left out, put in and
exchanged here and there, sentences that share words, and sentences again, in the tokens of a
checkpoint. Every answer is followed token by token: a step
drafts, and what holds is skipped. Known: steps that draft all that a form tells, and guess its
choices blindly.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence as Tokens
from types import SimpleNamespace
from typing import cast

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


def steps(drafter: Drafter, prompt: list[int], answer: list[int], most: int) -> tuple[int, int]:
    """Steps that an answer takes, and drafts made."""
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
    count, made, at = 1, 0, 1
    while at < len(answer):
        drafts: Tokens[int] = drafter.propose(sequence, min(most, len(answer) - at - 1))
        held = 0
        while held < len(drafts) and drafts[held] == answer[at + held]:
            held += 1
        known.token_ids += answer[at : at + held + 1]
        count, made, at = count + 1, made + len(drafts), at + held + 1
    drafter.forget(sequence)
    return count, made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", nargs="?", default="demo", help="whose tokens (demo)")
    parser.add_argument("--answers", type=int, default=40, help="of each kind")
    parser.add_argument("--drafts", type=int, default=7, help="in a step, at most")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(find_checkpoint(options.checkpoint) / "tokenizer.json"))
    print("| answers | tokens | tokens a step | drafts that held | known |")
    print("|---|---|---|---|---|")
    for kind in (*FORMS, "corrections", "sentences", "again"):
        drafter, total, tokens, drafted, known = SuffixDrafter(), 0, 0, 0, 0
        for prompt, answer, form in texts(kind, options.answers):
            encoded = tokenizer.encode(answer, add_special_tokens=False)
            ids = encoded.ids
            if form is not None:
                pieces = [answer[first:last] for first, last in encoded.offsets]
                known += 1 + form.known(pieces, options.drafts + 1)
            asked = tokenizer.encode(prompt, add_special_tokens=False).ids
            count, made = steps(drafter, asked, ids, options.drafts)
            total, tokens, drafted = total + count, tokens + len(ids), drafted + made
        held = (tokens - total) / max(1, drafted)
        best = f"{tokens / known:.2f}" if known else ""
        print(f"| {kind} | {tokens} | {tokens / total:.2f} | {100 * held:.0f} % | {best} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
