"""The request bodies of POST /v1/embeddings, /v1/rerank and /v1/score."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.api.chat.request import ChatMessage
from vlm_serve.server.api.fields import (
    MAX_MESSAGES,
    AnswerRequest,
    Items,
    RequestModel,
    Table,
    Tokens,
    Whole,
)

MAX_INPUTS = 1024


class PoolingRequest(AnswerRequest):
    """The fields that all three bodies share."""

    instruction: str | None = None
    user: str | None = None
    mm_processor_kwargs: Table[Any] | None = None
    media_io_kwargs: Table[Any] | None = None


class EmbeddingsRequest(PoolingRequest):
    input: str | Items[str] | Tokens | Items[Tokens] | None = None
    messages: Items[ChatMessage] | None = Field(None, max_length=MAX_MESSAGES)
    dimensions: Whole | None = None
    encoding_format: Literal["float", "base64"] | None = None


class PairContent(RequestModel):
    """Parts of a message, as in a chat."""

    content: str | Items[Table[Any]]


PairSide = str | PairContent


class RerankRequest(PoolingRequest):
    query: PairSide
    documents: Items[PairSide]
    top_n: Whole | None = None
    return_documents: bool | None = None


class ScoreRequest(PoolingRequest):
    text_1: PairSide | Items[PairSide]
    text_2: PairSide | Items[PairSide]


def check_number(count: int, field: str) -> None:
    """Raise InvalidRequestError if a list is empty or too long."""
    if not count:
        raise InvalidRequestError(f"{field} must not be empty", param=field)
    if count > MAX_INPUTS:
        raise InvalidRequestError(f"{field} has {count} items, at most {MAX_INPUTS}", param=field)


def content_of(side: PairSide) -> str | list[dict[str, Any]]:
    """Return a text or the parts of one side of a pair."""
    return side if isinstance(side, str) else side.content


def pairs_of(body: ScoreRequest) -> list[tuple[PairSide, PairSide]]:
    """Return the pairs of a score request: one to one, or one to many.

    Raises:
        InvalidRequestError: the lists do not fit each other.
    """
    first, second = (
        each if isinstance(each, list) else [each] for each in (body.text_1, body.text_2)
    )
    check_number(len(first), "text_1")
    check_number(len(second), "text_2")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequestError(
            f"text_1 has {len(first)} items and text_2 has {len(second)}: give one for all, or as "
            "many",
            param="text_1",
        )
    return list(zip(first, second, strict=True))
