"""The prompts of a pooling request, as work for preparation threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.keys import KeyScope
from vlm_serve.preprocess.pooled_prompts import embedding_messages, rerank_messages
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.server.api.conversation import prepare
from vlm_serve.server.api.pooling.request import (
    EmbeddingsRequest,
    PairSide,
    PoolingRequest,
    check_number,
    content_of,
)
from vlm_serve.server.api.prompts import prepare_tokens
from vlm_serve.server.service import Preparation, Service

Work = Callable[[], Preparation]


def embedding_work(
    service: Service, body: EmbeddingsRequest, value: Mapping[str, Any], own: KeyScope
) -> list[Work]:
    """Return the work for each input of an embeddings request.

    Args:
        service: what answers.
        body: the request.
        value: its JSON, from which messages are read.
        own: whose prompts they are.

    Raises:
        InvalidRequestError: there is no input, or it is given twice.
    """
    if (body.input is None) == (body.messages is None):
        raise InvalidRequestError("give either input or messages", param="input")
    if body.messages is not None:
        return [partial(prepare, service, read_conversation("chat", value), own)]
    given = body.input
    assert given is not None
    inputs: Sequence[Any] = [given] if _is_one(given) else given
    check_number(len(inputs), "input")
    return [_of_input(service, body, each, own) for each in inputs]


def _is_one(given: object) -> bool:
    """Return True for one text or one list of token ids."""
    return isinstance(given, str) or (
        isinstance(given, list) and bool(given) and isinstance(given[0], int)
    )


def _of_input(
    service: Service, body: PoolingRequest, given: str | list[int], own: KeyScope
) -> Work:
    if not isinstance(given, str):
        return partial(prepare_tokens, service, given, own)
    conversation = _conversation(body, embedding_messages(given, body.instruction))
    return partial(prepare, service, conversation, own)


def pair_work(
    service: Service, body: PoolingRequest, query: PairSide, document: PairSide, own: KeyScope
) -> Work:
    """Return the work for the prompt that judges a pair; it raises as `read_conversation`."""
    messages = rerank_messages(content_of(query), content_of(document), body.instruction)
    conversation = _conversation(body, messages)
    return partial(prepare, service, conversation, own)


def _conversation(body: PoolingRequest, messages: list[dict[str, Any]]) -> Conversation:
    options = {
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "media_io_kwargs": body.media_io_kwargs,
    }
    return read_conversation("chat", {"messages": messages, **options})
