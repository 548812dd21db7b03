"""Reads requests for decisions: what is to be judged, and the questions about it.

Forms: `/v1/decisions` of OpenAI, and System One, which `transformers serve` answers at
`/v1/systemone`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.cache_wishes import unmarked
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.items import read_response
from vlm_serve.preprocess.reading.parts import read_content
from vlm_serve.preprocess.reading.values import list_of, object_of, plain_data, short_repr, text_of

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
_JSON_BYTES = 256 << 10
_ITEM_LISTS = ("content", "output")
Kind = Literal["predicate", "choice", "score"]
KINDS: tuple[Kind, ...] = get_args(Kind)
K = TypeVar("K", bound=str)
Said = tuple[str | Mapping[str, Any], ...]
"""A text, with parts of a message between its pieces."""


@dataclass(frozen=True, slots=True)
class Option:
    """An answer to choose.

    Attributes:
        value: its name in answers: a text or a boolean; of a level, its label or description.
        name: how the prompt names it.
        description: what the prompt says of it; "" for nothing.
    """

    value: Any
    name: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A typed question.

    Attributes:
        kind: whether a statement is true, which option fits, or which level.
        name: the client's name for it.
        instructions: what is asked.
        options: at least one; those of a predicate are "true" and "false", of a score its levels,
            lowest first.
        place: its place in the request.
        assets: parts with pictures, by the texts that stand for them anywhere in the question.
    """

    kind: Kind
    name: str | None
    instructions: Said
    options: tuple[Option, ...]
    place: str = "questions"
    assets: Mapping[str, Any] = field(default_factory=dict)


def read_decision(body: Mapping[str, Any], conversation: Conversation) -> None:
    """Read the input of `/v1/decisions`: a text, or items of the Responses form.

    Raises InvalidRequestError, naming the item and field at fault.
    """
    given = body.get("input")
    if isinstance(given, list | tuple):
        items = [_item(item, f"input[{at}]") for at, item in enumerate(given)]
        read_response({"input": items}, conversation)
    else:
        read_response({"input": given}, conversation)


def read_state(body: Mapping[str, Any], conversation: Conversation) -> None:
    """Read the state of a System One request. Raises InvalidRequestError."""
    if "state" not in body:
        raise InvalidRequestError("state is missing", param="state")
    pieces = pieces_of(written(body["state"], "state"), assets_of(body))
    content = read_content(list(map(_part, pieces)), "state", conversation)
    conversation.messages.append({"role": "user", "content": content})


def read_questions(given: Any, ignored: list[str]) -> list[Question]:
    """Read the questions of `/v1/decisions`. Raises InvalidRequestError, naming the field.

    Args:
        ignored: gets the places of cache marks, which have an effect in the input alone.
    """
    questions = list_of(unmarked(given, "questions", ignored), "questions")
    _check_count(len(questions))
    return [_question(each, f"questions[{at}]") for at, each in enumerate(questions)]


def read_system_one(given: Any, assets: Mapping[str, Any]) -> list[Question]:
    """Read the questions of a System One request by their names.

    Args:
        assets: parts with pictures, by the text that stands for them.

    Raises InvalidRequestError, naming the field.
    """
    questions = object_of(given, "questions")
    _check_count(len(questions))
    return [_named_question(name, each, assets) for name, each in questions.items()]


def assets_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pictures of a System One request as parts, by the text that stands for them."""
    assets = {}
    for name, asset in object_of(body.get("assets") or {}, "assets").items():
        where = f"assets.{name}"
        data = text_of(object_of(asset, where), "data_base64", where)
        url = f"data:image/{asset.get('format') or 'png'};base64,{data}"
        assets[name] = {"type": "input_image", "image_url": url}
    if "" in assets:
        raise InvalidRequestError("assets must have names that are not empty", param="assets")
    return assets


def pieces_of(text: str, assets: Mapping[str, Any]) -> Said:
    """Return a text with pictures in the places that stand for them."""
    if not assets:
        return (text,)
    names = sorted(assets, key=len, reverse=True)
    split = re.split(f"({'|'.join(map(re.escape, names))})", text)
    pieces = ((piece, at % 2) for at, piece in enumerate(split) if piece)
    return tuple(assets[piece] if is_name else piece for piece, is_name in pieces)


def written(value: Any, where: str) -> str:
    """Return a value of JSON as the prompt shows it: a text as it is, nothing for null."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(plain_data(value, where), ensure_ascii=False)


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_QUESTIONS:
        raise InvalidRequestError(
            f"questions must be 1 to {MAX_QUESTIONS}, got {count}", param="questions"
        )


def _item(item: Any, where: str) -> Any:
    """Return an item whose parts of JSON are parts of text."""
    if not isinstance(item, Mapping):
        return item
    lists = {name: item[name] for name in _ITEM_LISTS if isinstance(item.get(name), list | tuple)}
    return {**item, **{name: _said(parts, f"{where}.{name}") for name, parts in lists.items()}}


def _text_for(part: Any, where: str) -> Any:
    """Return a part of text for one of JSON, any other part as it is."""
    if not isinstance(part, Mapping) or part.get("type") != "input_json":
        return part
    data = part.get("data")
    if not isinstance(data, Mapping | list | tuple):
        raise InvalidRequestError(f"{where}.data must be an object or a list", param=where)
    text = json.dumps(plain_data(data, f"{where}.data"), ensure_ascii=False)
    if len(text.encode("utf-8", "surrogatepass")) > _JSON_BYTES:
        raise InvalidRequestError(
            f"{where}.data must have at most {_JSON_BYTES} bytes as JSON", param=where
        )
    return _part(text)


def _part(piece: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "input_text", "text": piece} if isinstance(piece, str) else piece


def _said(given: Any, where: str) -> Said:
    """Return instructions: a text, or parts of text, JSON and pictures."""
    if isinstance(given, str):
        return (given,)
    parts = list_of(given, where, "text or a list of parts")
    return tuple(_text_for(part, f"{where}[{at}]") for at, part in enumerate(parts))


def _kind(question: Mapping[str, Any], kinds: Sequence[K], where: str) -> K:
    named = question.get("type")
    for kind in kinds:
        if kind == named:
            return kind
    raise InvalidRequestError(
        f"{where}.type must be one of {', '.join(kinds)}, not {short_repr(named)}",
        param=f"{where}.type",
    )


def _question(given: Any, where: str) -> Question:
    question = object_of(given, where)
    kind = _kind(question, KINDS, where)
    name = None if question.get("name") is None else text_of(question, "name", where)
    instructions = _said(question.get("instructions"), f"{where}.instructions")
    if kind == "predicate":
        return Question(kind, name, instructions, TRUE_OR_FALSE, where)
    field, read = ("choices", _choice) if kind == "choice" else ("levels", _level)
    options = tuple(_options(question.get(field), f"{where}.{field}", read))
    return Question(kind, name, instructions, options, where)


def _options(
    given: Any, where: str, read: Callable[[Mapping[str, Any], str], Option]
) -> Iterator[Option]:
    options = list_of(given, where)
    if not 2 <= len(options) <= MAX_OPTIONS:
        raise InvalidRequestError(
            f"{where} must have 2 to {MAX_OPTIONS} entries, got {len(options)}", param=where
        )
    seen = set()
    for at, each in enumerate(options):
        option = read(object_of(each, f"{where}[{at}]"), f"{where}[{at}]")
        key = type(option.value), option.value
        if key in seen:
            raise InvalidRequestError(f"{where}[{at}] is there already", param=f"{where}[{at}]")
        seen.add(key)
        yield option


def _described(option: Mapping[str, Any], where: str) -> str:
    return "" if option.get("description") is None else text_of(option, "description", where)


def _choice(option: Mapping[str, Any], where: str) -> Option:
    value = option.get("value")
    if not isinstance(value, str | bool):
        raise InvalidRequestError(f"{where}.value must be text or a boolean", param=where)
    name = value if isinstance(value, str) else json.dumps(value)
    return Option(value, name, _described(option, where))


def _level(option: Mapping[str, Any], where: str) -> Option:
    label, more = text_of(option, "label", where), _described(option, where)
    return Option(label, label, f"{label}: {more}" if more else label)


_NAMED: dict[str, Kind] = {"noul": "predicate", "choice": "choice", "score": "score"}
"""Types of System One."""
TRUE_OR_FALSE = Option(True, "true"), Option(False, "false")


def _named_question(name: str, given: Any, assets: Mapping[str, Any]) -> Question:
    where = f"questions.{name}"
    question = object_of(given, where)
    kind = _kind(question, tuple(_NAMED), where)
    options = _named_options(kind, question.get("criteria"), f"{where}.criteria")
    instructions = written(question.get("instructions"), f"{where}.instructions")
    return Question(_NAMED[kind], name, (instructions,), tuple(options), where, assets)


def _named_options(kind: str, criteria: Any, where: str) -> list[Option]:
    if kind == "noul":
        told = object_of({} if criteria is None else criteria, where)
        unknown = [key for key in told if key not in ("true", "false")]
        if unknown:
            raise InvalidRequestError(
                f"{where} describes true and false, not {short_repr(unknown[0])}", param=where
            )
        pairs: list[tuple[str, Any]] = [(key, told.get(key)) for key in ("true", "false")]
    elif kind == "choice":
        pairs = list(object_of(criteria, where).items())
    else:
        pairs = [(str(at), level) for at, level in enumerate(list_of(criteria, where))]
    if not 1 <= len(pairs) <= MAX_OPTIONS:
        raise InvalidRequestError(
            f"{where} must have 1 to {MAX_OPTIONS} entries, got {len(pairs)}", param=where
        )
    return [
        Option(more if kind == "score" else key, key, written(more, f"{where}.{key}"))
        for key, more in pairs
    ]
