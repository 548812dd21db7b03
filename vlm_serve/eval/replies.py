"""Requests of a benchmark and the replies to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vlm_serve.eval.flags import DECODING
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of a benchmark's answers.

    Attributes:
        decoding: some of DECODING.
        max_tokens: most tokens of an answer.
        temperature, seed: of seeded answers.
    """

    decoding: tuple[str, ...] = DECODING
    max_tokens: int = 128
    temperature: float = 0.7
    seed: int = 0

    def params(self, decoding: str) -> SamplingParams:
        """Return the sampling options for one decoding. Raises FieldError for a bad number."""
        if decoding == "greedy":
            return SamplingParams(max_tokens=self.max_tokens, temperature=0.0)
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed
        )


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """One answer of the model, without its thought. Finish reason, tokens and reasoning are empty
    where they are unknown; the tokens are those of the thought too."""

    text: str
    finish_reason: str = ""
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of some requests."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    @property
    def computed(self) -> int:
        """Prompt tokens that the model computed."""
        return self.prompt - self.cached

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt if self.prompt else 0.0

    @classmethod
    def sum(cls, counts: Iterable[TokenCounts]) -> TokenCounts:
        listed = list(counts)
        return cls(
            sum(count.prompt for count in listed),
            sum(count.cached for count in listed),
            sum(count.generated for count in listed),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one item of a part.

    Attributes:
        item: name of the item, equal on both sides.
        answers: in the order of the turns.
        scores: for each choice, the log-probability (natural log) of each token.
        chosen: the text to compare with the right answer, as the report shows it.
        expected: the right answer; None if the data has none.
        right: True if the answer is right; None if the data has no right answer.
        groups: of items to count this one in, such as "hard".
        tokens: of all requests of the item.
        error: reason of a failure; the other fields are then empty.
    """

    item: str
    answers: tuple[TurnAnswer, ...] = ()
    scores: tuple[tuple[float, ...], ...] = ()
    chosen: str = ""
    expected: str | None = None
    right: bool | None = None
    groups: tuple[str, ...] = ()
    tokens: TokenCounts = TokenCounts()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """An item: its name, and a function that asks it. That raises VlmServeError on failure."""

    item: str
    ask: Callable[[Pipeline], Reply]


@dataclass(frozen=True, slots=True)
class BenchmarkPart:
    """Items reported together; the cache is empty at their start.

    Attributes:
        name: in the report.
        note: a sentence on what can be reused.
        groups: items with a common document or video, asked in order. Groups may run concurrently.
    """

    name: str
    note: str
    groups: Sequence[Sequence[Case]]


@dataclass(frozen=True, slots=True)
class AnswerRun:
    """A part, answered by one side."""

    replies: tuple[Reply, ...]
    seconds: float
    tokens: TokenCounts


def turn_answer_of(output: Output) -> TurnAnswer:
    tokens, reasoning = tuple(output.token_ids), output.reasoning or ""
    return TurnAnswer(output.text, output.finish_reason, tokens, reasoning)


def tokens_of(outputs: Iterable[Output]) -> TokenCounts:
    usages = [output.usage for output in outputs]
    return TokenCounts.sum(
        TokenCounts(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        for usage in usages
    )
