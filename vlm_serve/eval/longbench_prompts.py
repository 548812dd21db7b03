"""The published prompts of LongBench v2 (Bai et al., 2024), word for word.

Scores are comparable with published ones only for identical prompts.
"""

from __future__ import annotations

import re

from vlm_serve.eval.longbench_data import LongBenchItem

_OMITTED = "\n\nThe text is too long and omitted here.\n\n"
_FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'
_READ_ONE = "Please read the following text and answer the question below."
_READ = "Please read the following text and answer the questions below."
_THINK = "\n\nLet’s think step by step:"
CONCLUSION = f"Based on the above, what is the single, most likely answer choice? {_FORMAT}"
"""The question of the second prompt, after the reasoning."""
_ANSWERS = (
    re.compile(r"The correct answer is \(([A-D])\)"),
    re.compile(r"The correct answer is ([A-D])"),
)


def direct_prompt(item: LongBenchItem) -> str:
    """Return the 0-shot prompt."""
    return f"{_READ_ONE}{_document(item)}{_question(item)}\n\n{_FORMAT}"


def reasoning_prompt(item: LongBenchItem) -> str:
    """Return the first prompt of the 0-shot chain of thought."""
    return f"{_READ}{_document(item)}{_question(item)}{_THINK}"


def omitting_prompt(item: LongBenchItem, reasoning: str) -> str:
    """Return the complete second prompt, which omits the document."""
    return f"{_READ}{_OMITTED}{_question(item)}{_THINK} {reasoning.strip()}\n\n{CONCLUSION}"


def scoring_prompt(item: LongBenchItem) -> str:
    """Return the prefix of scored choices: the 0-shot prompt, ended as in lm-evaluation-harness."""
    return f"{_READ_ONE}{_document(item)}{_question(item)}\n\nAnswer:"


def chosen_letter(response: str) -> str:
    """Return the letter that an answer gives in the requested format; "" if it gives none."""
    for form in _ANSWERS:
        found = form.search(response.replace("*", ""))
        if found is not None:
            return found[1]
    return ""


def _document(item: LongBenchItem) -> str:
    return f"\n\n<text>\n{item.context.strip()}\n</text>\n\n"


def _question(item: LongBenchItem) -> str:
    choices = zip("ABCD", item.choices, strict=True)
    listed = "\n".join(f"({letter}) {choice.strip()}" for letter, choice in choices)
    asked = item.question.strip()
    return f"What is the correct answer to this question: {asked}\nChoices:\n{listed}"
