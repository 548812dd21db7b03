"""The prompts that LongBench v2 was published with (Bai et al., 2024), word for word: scores can be
compared with those of others only if the model is asked the same."""

from __future__ import annotations

import re

from vlm_serve.eval.longbench_data import Item

_OMITTED = "\n\nThe text is too long and omitted here.\n\n"
_FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'
_READ_ONE = "Please read the following text and answer the question below."
_READ = "Please read the following text and answer the questions below."
_THINK = "\n\nLet’s think step by step:"
CONCLUSION = f"Based on the above, what is the single, most likely answer choice? {_FORMAT}"
"""What its second prompt asks after the reasoning."""
_ANSWERS = (
    re.compile(r"The correct answer is \(([A-D])\)"),
    re.compile(r"The correct answer is ([A-D])"),
)


def direct_prompt(item: Item) -> str:
    """Its 0-shot prompt."""
    return f"{_READ_ONE}{_document(item)}{_question(item)}\n\n{_FORMAT}"


def reasoning_prompt(item: Item) -> str:
    """The first prompt of its 0-shot chain of thought."""
    return f"{_READ}{_document(item)}{_question(item)}{_THINK}"


def omitting_prompt(item: Item, reasoning: str) -> str:
    """Its second prompt as a whole. The document is no part of it."""
    return f"{_READ}{_OMITTED}{_question(item)}{_THINK} {reasoning.strip()}\n\n{CONCLUSION}"


def scoring_prompt(item: Item) -> str:
    """What choices are scored behind; the 0-shot prompt as lm-evaluation-harness ends it."""
    return f"{_READ_ONE}{_document(item)}{_question(item)}\n\nAnswer:"


def chosen_letter(response: str) -> str:
    """The letter that an answer names in the form that it was asked for; "" if it names none."""
    for form in _ANSWERS:
        found = form.search(response.replace("*", ""))
        if found is not None:
            return found[1]
    return ""


def _document(item: Item) -> str:
    return f"\n\n<text>\n{item.context.strip()}\n</text>\n\n"


def _question(item: Item) -> str:
    choices = zip("ABCD", item.choices, strict=True)
    listed = "\n".join(f"({letter}) {choice.strip()}" for letter, choice in choices)
    asked = item.question.strip()
    return f"What is the correct answer to this question: {asked}\nChoices:\n{listed}"
