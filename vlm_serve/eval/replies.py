"""What is asked, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vlm_serve.pipeline import Output, Pipeline
from vlm_serve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the model. Whoever does not learn its finish reason or its tokens leaves them
    empty."""

    text: str
    finish_reason: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """How many tokens some requests had, and how many of their prompts' came from the cache."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    @property
    def computed(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt - self.cached

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt if self.prompt else 0.0

    @classmethod
    def sum(cls, counts: Iterable[Tokens]) -> Tokens:
        listed = list(counts)
        return cls(
            sum(each.prompt for each in listed),
            sum(each.cached for each in listed),
            sum(each.generated for each in listed),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one item of a part.

    Attributes:
        item: names it; the same on both sides.
        answers: in the order of its turns.
        scores: of its choices, in order: the log-probability (natural log) of each token.
        chosen: what is compared with the right answer, as the report shows it.
        expected: the right answer; None if the data has none.
        right: whether it is; None if the data has no right answer.
        groups: of items that this one is counted in, such as "hard".
        tokens: of all its requests.
        error: why there is no answer; then there is nothing else.
    """

    item: str
    answers: tuple[Answer, ...] = ()
    scores: tuple[tuple[float, ...], ...] = ()
    chosen: str = ""
    expected: str | None = None
    right: bool | None = None
    groups: tuple[str, ...] = ()
    tokens: Tokens = Tokens()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """An item: its name, and what asks it. The latter raises VlmServeError if that fails."""

    item: str
    ask: Callable[[Pipeline], Reply]


@dataclass(frozen=True, slots=True)
class Part:
    """Items whose figures are reported together; the cache is empty when they begin.

    Attributes:
        name: as the report has it.
        note: what of it can be reused, in a sentence.
        groups: items with something in common, which are asked one after the other. Groups may be
            asked side by side.
    """

    name: str
    note: str
    groups: Sequence[Sequence[Question]]


@dataclass(frozen=True, slots=True)
class Run:
    """A part as one side has answered it, within so many seconds."""

    replies: tuple[Reply, ...]
    seconds: float
    tokens: Tokens


def answer_of(output: Output) -> Answer:
    return Answer(output.text, output.finish_reason, tuple(output.token_ids))


def tokens_of(outputs: Iterable[Output]) -> Tokens:
    usages = [output.usage for output in outputs]
    return Tokens.sum(
        Tokens(each.prompt_tokens, each.cached_tokens, each.completion_tokens) for each in usages
    )


def sampling_of(decoding: str, max_tokens: int, temperature: float, seed: int) -> SamplingParams:
    """The sampling of one of DECODING. Raises FieldError for a number that is out of bounds."""
    if decoding == "greedy":
        return SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
