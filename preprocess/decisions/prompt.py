"""Words of a question behind its input: those of `DECISION_PROMPT` in transformers' `decision`.

Answers are thus comparable with its decision pipeline, for which `tests` compare both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlm_serve.preprocess.decisions.labels import LETTERS
from vlm_serve.preprocess.reading.conversation import Conversation, text_part
from vlm_serve.preprocess.reading.decisions import Option, Question, Said, pieces_of
from vlm_serve.preprocess.reading.parts import read_part


def conversation_about(
    about: Conversation, question: Question, labels: Sequence[str]
) -> Conversation:
    """Return the input with a question behind it: in the last message, if that is the user's.

    Raises InvalidRequestError, naming the part of the question at fault.
    """
    where = f"{question.place}.instructions"
    asked = replace(about, messages=list(about.messages), media=list(about.media))
    last = asked.messages[-1]
    joins = last["role"] == "user"
    given = last.get("content") if joins else None
    before = [text_part(given)] if isinstance(given, str) else list(given or ())
    for piece in (*(("\n\n",) if joins else ()), *said(question, labels)):
        part = text_part(piece) if isinstance(piece, str) else read_part(piece, where, asked)
        if part["type"] == "text" and before and before[-1]["type"] == "text":
            before[-1] = text_part(before[-1]["text"] + part["text"])
        else:
            before.append(part)
    plain = len(before) == 1 and not isinstance(given, list)
    content: Any = before[0]["text"] if plain else before
    asked.messages[len(asked.messages) - joins :] = [{"role": "user", "content": content}]
    return asked


def said(question: Question, labels: Sequence[str]) -> Said:
    """Return the words of a question: what is asked, its options, how to answer."""
    pieces: list[str | Mapping[str, Any]] = []
    if any(each != "" for each in question.instructions):
        pieces += [*question.instructions, "\n"]
    for line in _option_lines(question, labels):
        pieces += [line, "\n"]
    pieces.append(_closing(question, labels))
    text = (
        pieces_of(each, question.assets) if isinstance(each, str) else (each,) for each in pieces
    )
    return tuple(piece for some in text for piece in some)


def _option_lines(question: Question, labels: Sequence[str]) -> Iterator[str]:
    for option, label in zip(question.options, labels, strict=True):
        if question.kind != "predicate":
            yield f"{label}. {_named(option, question)}"
        elif option.description:
            yield f"{label}: {option.description}"


def _named(option: Option, question: Question) -> str:
    if question.kind == "score":
        return option.description
    return f"{option.name}: {option.description}" if option.description else option.name


def _closing(question: Question, labels: Sequence[str]) -> str:
    if question.kind == "predicate":
        return f"Answer {labels[0]} or {labels[1]} only."
    kind = "letter" if len(labels) <= len(LETTERS) else "label"
    of = "option" if question.kind == "choice" else "level"
    return f"Answer with the {kind} of the {of} that fits best ({labels[0]} to {labels[-1]}) only."
