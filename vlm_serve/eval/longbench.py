"""LongBench v2: direct answers, answers after a turn of reasoning, and scored choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vlm_serve.eval.choices import DECODING, DEFAULT_PARTS
from vlm_serve.eval.longbench_data import LongBenchItem
from vlm_serve.eval.longbench_prompts import (
    CONCLUSION,
    chosen_letter,
    direct_prompt,
    omitting_prompt,
    reasoning_prompt,
    scoring_prompt,
)
from vlm_serve.eval.replies import (
    BenchmarkPart,
    Case,
    Reply,
    completion_of,
    sampling_of,
    tokens_of,
)
from vlm_serve.eval.truncating import fit, keep_ends
from vlm_serve.pipeline.pipeline import Output, Pipeline
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
class LongBenchOptions:
    """Options of the questions.

    Attributes:
        parts: some of `choices.PARTS`.
        decoding: some of DECODING; scoring needs none.
        max_tokens: most tokens of an answer.
        reasoning_tokens: most tokens of the reasoning in the first of two turns.
        temperature, seed: of seeded answers.
    """

    parts: tuple[str, ...] = DEFAULT_PARTS
    decoding: tuple[str, ...] = DECODING
    max_tokens: int = 128
    reasoning_tokens: int = 1024
    temperature: float = 0.1
    seed: int = 0

    def params(self, decoding: str) -> SamplingParams:
        """Return the sampling options. Raises FieldError for a number out of bounds."""
        return sampling_of(decoding, self.max_tokens, self.temperature, self.seed)


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
    sums = [sum(each) for each in scores]
    chosen = "ABCD"[sums.index(max(sums))]
    return _judged(item, chosen, outputs, scores)


def _log_probabilities(output: Output, ending: Sequence[int]) -> tuple[float, ...]:
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs, ending, strict=True)
    return tuple(row.logprobs[token] for row, token in rows)


def _reply(item: LongBenchItem, outputs: Sequence[Output]) -> Reply:
    return _judged(item, chosen_letter(outputs[-1].text), outputs, ())


def _judged(
    item: LongBenchItem,
    chosen: str,
    outputs: Sequence[Output],
    scores: tuple[tuple[float, ...], ...],
) -> Reply:
    return Reply(
        item.id,
        () if scores else tuple(map(completion_of, outputs)),
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
