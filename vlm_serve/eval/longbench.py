"""LongBench v2: direct answers, answers after a turn of reasoning, and scored choices.

The prompts are the published ones (Bai et al., 2024), word for word: scores are comparable with
published ones only for identical prompts. Texts are truncated in the middle, since instructions are
at both ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vlm_serve.eval.flags import DEFAULT_PARTS
from vlm_serve.eval.longbench_data import LongBenchItem
from vlm_serve.eval.replies import (
    AnswerOptions,
    BenchmarkPart,
    Case,
    Reply,
    tokens_of,
    turn_answer_of,
)
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.sampling_params import SamplingParams

_NOTES = {
    "direct": "Each document has one question, so only the template can be reused.",
    "two-turn": "The second turn continues the first one and can reuse its prompt.",
    "two-turn-omitting": "The second prompt omits the document, as published, so only the template "
    "can be reused.",
    "scoring": "The prompts of the four choices differ only in their last tokens and can reuse the "
    "document.",
}


@dataclass(frozen=True, slots=True)
class LongBenchOptions(AnswerOptions):
    """Options of the questions; scoring needs no decoding.

    Attributes:
        parts: some of `choices.PARTS`.
        reasoning_tokens: most tokens of the reasoning in the first of two turns.
    """

    parts: tuple[str, ...] = DEFAULT_PARTS
    reasoning_tokens: int = 1024


def longbench_parts(
    items: Sequence[LongBenchItem], options: LongBenchOptions
) -> Iterator[BenchmarkPart]:
    """Yield the parts of the benchmark. Each document is its own group."""
    asks: dict[str, Any] = {
        "direct": _ask_directly,
        "two-turn": _ask_in_two_turns,
        "two-turn-omitting": partial(_ask_in_two_turns, omitting=True),
    }
    for name in options.parts:
        if name == "scoring":
            groups = [[Case(item.id, partial(_score, item=item))] for item in items]
            yield BenchmarkPart(name, _NOTES[name], groups)
            continue
        for decoding in options.decoding:
            params = options.params(decoding)
            ask = partial(asks[name], params=params, reasoning_tokens=options.reasoning_tokens)
            groups = [[Case(item.id, partial(ask, item=item))] for item in items]
            yield BenchmarkPart(f"{name}, {decoding}", _NOTES[name], groups)


def _ask_directly(
    pipe: Pipeline, *, item: LongBenchItem, params: SamplingParams, reasoning_tokens: int
) -> Reply:
    assert params.max_tokens is not None
    asked = _fit(pipe, direct_prompt(item), params.max_tokens, lambda text: [_user(text)])
    return _reply(item, [pipe.chat([_user(asked)], params)])


def _ask_in_two_turns(
    pipe: Pipeline,
    *,
    item: LongBenchItem,
    params: SamplingParams,
    reasoning_tokens: int,
    omitting: bool = False,
) -> Reply:
    """Ask for reasoning, then for the answer.

    The second prompt extends the first one and its answer. `omitting` sends the published second
    prompt, a single message without the document. A first answer that its token limit ended inside
    the model's thought has no text: then the thought is the reasoning.
    """
    assert params.max_tokens is not None

    def both(asked: str, reasoning: str) -> list[dict[str, Any]]:
        return [_user(asked), {"role": "assistant", "content": reasoning}, _user(CONCLUSION)]

    reserved = reasoning_tokens + params.max_tokens
    asked = _fit(pipe, reasoning_prompt(item), reserved, lambda text: both(text, ""))
    first = pipe.chat([_user(asked)], replace(params, max_tokens=reasoning_tokens))
    reasoned = first.text or first.reasoning or ""
    if omitting:
        last = _fit(
            pipe, omitting_prompt(item, reasoned), params.max_tokens, lambda text: [_user(text)]
        )
        return _reply(item, [first, pipe.chat([_user(last)], params)])
    # Generated text may encode to more tokens than were generated.
    reasoning = _fit(pipe, reasoned.strip(), params.max_tokens, lambda text: both(asked, text))
    return _reply(item, [first, pipe.chat(both(asked, reasoning), params)])


def _score(pipe: Pipeline, *, item: LongBenchItem) -> Reply:
    """Score " A" to " D" after the same text; the most probable one is the answer."""
    encode = pipe.engine.preprocessor.tokenizer.encode_plain
    endings = [encode(f" {letter}") for letter in "ABCD"]
    limit = pipe.engine.max_model_len - max(map(len, endings)) - 1
    text = keep_ends(encode(scoring_prompt(item)), limit)
    params = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=len(text)
    )
    outputs = [pipe.generate([*text, *ending], params) for ending in endings]
    pairs = zip(outputs, endings, strict=True)
    scores = tuple(_log_probabilities(output, ending) for output, ending in pairs)
    return _reply(item, outputs, scores)


def _log_probabilities(output: Output, ending: Sequence[int]) -> tuple[float, ...]:
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs, ending, strict=True)
    return tuple(row.logprobs[token] for row, token in rows)


def _reply(
    item: LongBenchItem, outputs: Sequence[Output], scores: tuple[tuple[float, ...], ...] = ()
) -> Reply:
    """Judge the last answer, or else the choice with the best score."""
    sums = [sum(probabilities) for probabilities in scores]
    chosen = "ABCD"[sums.index(max(sums))] if sums else chosen_letter(outputs[-1].text)
    return Reply(
        item.id,
        () if scores else tuple(map(turn_answer_of, outputs)),
        scores,
        chosen=chosen,
        expected=item.answer,
        right=chosen == item.answer,
        groups=(item.difficulty, item.length),
        tokens=tokens_of(outputs),
    )


def _fit(pipe: Pipeline, text: str, reserved: int, messages: Any) -> str:
    """Cut the text so that its prompt leaves `reserved` tokens of the context."""
    preprocessor = pipe.engine.preprocessor
    return fit(
        text,
        preprocessor.tokenizer,
        pipe.engine.max_model_len - reserved,
        lambda shorter: len(preprocessor.prepare(messages(shorter))),
    )


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def keep_ends(token_ids: Sequence[int], count: int) -> list[int]:
    """Return the first and the last `count / 2` tokens, or all if there are at most `count`."""
    if len(token_ids) <= count:
        return list(token_ids)
    first = count // 2
    return [*token_ids[:first], *token_ids[len(token_ids) - (count - first) :]]


def fit(text: str, tokenizer: Tokenizer, limit: int, length_of: Callable[[str], int]) -> str:
    """Return the text, cut in the middle until its prompt fits; it may become empty.

    Args:
        limit: tokens of the whole prompt.
        length_of: returns the tokens of the prompt with a given text. It is called only with texts
            of at most `limit` tokens.
    """
    ids = tokenizer.encode_plain(text)
    kept = min(limit, len(ids))
    while kept > 0:
        shorter = text if kept == len(ids) else tokenizer.decode(keep_ends(ids, kept))
        # A character or word that was cut may encode to more tokens than before.
        excess = max(len(tokenizer.encode_plain(shorter)), kept) - limit
        if excess <= 0:
            excess = length_of(shorter) - limit
        if excess <= 0:
            return shorter
        kept -= excess
    return ""


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
        match = form.search(response.replace("*", ""))
        if match is not None:
            return match[1]
    return ""


def _document(item: LongBenchItem) -> str:
    return f"\n\n<text>\n{item.context.strip()}\n</text>\n\n"


def _question(item: LongBenchItem) -> str:
    choices = zip("ABCD", item.choices, strict=True)
    listed = "\n".join(f"({letter}) {choice.strip()}" for letter, choice in choices)
    asked = item.question.strip()
    return f"What is the correct answer to this question: {asked}\nChoices:\n{listed}"
