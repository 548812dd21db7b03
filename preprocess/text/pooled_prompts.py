"""Conversations for embeddings and for reranking, as the cards of Qwen3-VL-Embedding and
Qwen3-VL-Reranker write them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import text_part

Content = str | Sequence[Mapping[str, Any]]
"""A text, or parts of a message as in OpenAI's chat."""

EMBED_INSTRUCTION = "Represent the user's input."
RERANK_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_NOTHING = "NULL"


def embedding_messages(content: Content, instruction: str | None = None) -> list[dict[str, Any]]:
    """Return the conversation whose last token's hidden state is the embedding of some content.

    Args:
        content: what is embedded.
        instruction: what the embedding is for; a full stop is added if it ends without
            punctuation. None: the card's.
    """
    said = (EMBED_INSTRUCTION if instruction is None else instruction).strip()
    if said and not unicodedata.category(said[-1]).startswith("P"):
        said += "."
    return [
        {"role": "system", "content": [text_part(said)]},
        {"role": "user", "content": _parts(content)},
    ]


def rerank_messages(
    query: Content, document: Content, instruction: str | None = None
) -> list[dict[str, Any]]:
    """Return the conversation that asks whether a document meets a query, yes or no.

    Args:
        query, document: the pair.
        instruction: what is asked of documents; None: the card's.
    """
    told = RERANK_INSTRUCTION if instruction is None else instruction
    content = [text_part(f"<Instruct>: {told}"), text_part("<Query>:"), *_parts(query)]
    content += [text_part("\n<Document>:"), *_parts(document)]
    return [
        {"role": "system", "content": [text_part(_JUDGE)]},
        {"role": "user", "content": content},
    ]


def contents_of(contents: Iterable[Content]) -> Iterable[Content]:
    """Return contents as they are. Raises InvalidRequestError for one in place of a list."""
    if isinstance(contents, str | Mapping) or not isinstance(contents, Iterable):
        raise InvalidRequestError("contents must be a list: of texts, or of lists of parts")
    return contents


def _parts(content: Content) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text_part(content or _NOTHING)]
    given: object = content
    if not isinstance(given, list | tuple) or not all(isinstance(x, Mapping) for x in given):
        raise InvalidRequestError("a content must be a text, or a list of parts of a message")
    return [dict(part) for part in given] or [text_part(_NOTHING)]
