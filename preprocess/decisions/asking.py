"""A question about an input: its prompts, and the answer that their log-probabilities give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlm_serve.errors import FieldError
from vlm_serve.preprocess.decisions.labels import LabelTree, labels_of
from vlm_serve.preprocess.decisions.prompt import conversation_about
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.decisions import Question
from vlm_serve.preprocess.text.template import SWITCH, TemplateTraits
from vlm_serve.preprocess.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question.

    Attributes:
        probabilities: of each option, in their order; their sum is 1.
        mass: probability that the model's answer begins with one of the labels at all.
        refused: the mass is less than the caller wants.
    """

    question: Question
    probabilities: tuple[float, ...]
    mass: float
    refused: bool = False

    @property
    def name(self) -> str | None:
        """The question's name."""
        return self.question.name

    @property
    def probability(self) -> float:
        """The probability of the first option: that a predicate's statement is true."""
        return self.probabilities[0]

    @property
    def best(self) -> int:
        """The index of the likeliest option, the first one in a tie."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def choice(self) -> Any:
        """The value of the likeliest option."""
        return self.question.options[self.best].value

    @property
    def score(self) -> float:
        """The mean level, counted from 0."""
        return sum(level * each for level, each in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        """The distance of the probabilities from equal ones, 0 to 1, as transformers defines it.

        A score's is 1 minus the mean distance from the likeliest level, over the distance of
        equally likely levels from their middle.
        """
        count = len(self.probabilities)
        if count == 1:
            return 1.0
        if self.question.kind != "score":
            return max(0.0, (max(self.probabilities) - 1 / count) / (1 - 1 / count))
        best, middle = self.best, (count - 1) / 2
        distance = sum(each * abs(at - best) for at, each in enumerate(self.probabilities))
        return max(0.0, 1 - distance * count / sum(abs(at - middle) for at in range(count)))


def ask(
    about: Conversation,
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    traits: TemplateTraits,
) -> list[Asked]:
    """Return the questions about an input, to be answered without a thought.

    Args:
        tokenizer, traits: the model's.

    Raises InvalidRequestError, naming the part of a question at fault.
    """
    if SWITCH in traits.variables:
        about = replace(about, template_kwargs={SWITCH: False} | about.template_kwargs)
    trees = dict[tuple[str, ...], LabelTree]()
    asked = []
    for question in questions:
        labels = labels_of(question.kind, len(question.options))
        if labels not in trees:
            trees[labels] = LabelTree.of([tokenizer.encode_plain(label) for label in labels])
        asked.append(Asked(about, question, labels, trees[labels]))
    return asked


class Asked:
    """A question about an input.

    Args:
        about: the input.
        question: what is asked.
        labels: of its options.
        tree: their tokens.

    Attributes:
        prompts: conversations, each with the tokens that may come next. There is one for each
            beginning that labels share; all have the input in common.

    Raises InvalidRequestError, naming the part of the question at fault.
    """

    def __init__(
        self,
        about: Conversation,
        question: Question,
        labels: Sequence[str],
        tree: LabelTree,
    ) -> None:
        self.question = question
        asked = conversation_about(about, question, labels)
        self._tree = tree
        self.prompts = [
            (replace(asked, answer_ids=each.ids), each.following) for each in tree.shared
        ]

    def answer(self, told: Sequence[Mapping[int, float]], refuse_below: float = 0.0) -> Answer:
        """Return the answer.

        Args:
            told: log-probabilities of the tokens that may come next, of each prompt.
            refuse_below: the least mass of the labels.
        """
        logprobs = self._tree.logprobs(told)
        largest = max(logprobs)
        weights = [math.exp(each - largest) for each in logprobs]
        total = sum(weights)
        mass = min(1.0, math.exp(largest) * total)
        probabilities = tuple(weight / total for weight in weights)
        return Answer(self.question, probabilities, mass, mass < refuse_below)


def check_mass(refuse_below: float) -> None:
    """Raise InvalidRequestError unless the least mass of labels is a share."""
    if not 0 <= refuse_below <= 1:
        raise FieldError("refuse_below", "must be 0 to 1")
