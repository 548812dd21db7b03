"""Conversations for embeddings and for reranking, as the cards of Qwen3-VL-Embedding,
Qwen3-VL-Reranker and Qwen3-Reranker write them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import text_part
from vlm_serve.preprocess.text.sentence_files import Sentences

Content = str | Sequence[Mapping[str, Any]]
"""A text, or parts of a message as in OpenAI's chat."""

EMBED_INSTRUCTION = "Represent the user's input."
RERANK_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
TEXT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_NOTHING = "NULL"


def embedding_messages(
    content: Content,
    instruction: str | None = None,
    sentences: Sentences | None = None,
    name: str | None = None,
) -> list[dict[str, Any]]:
    """Return the conversation whose last token's hidden state is the embedding of some content.

    Args:
        content: what is embedded.
        instruction: what the embedding is for; a full stop is added if it ends without
            punctuation. None: the card's.
        sentences: of a model of texts alone, whose inputs have a prompt before them.
        name: of that prompt.

    Raises:
        InvalidRequestError: there is no such prompt.
    """
    if sentences is not None:
        prompt = sentences.prompt(name)
        prompt = prompt if instruction is None else f"Instruct: {instruction}\nQuery:"
        return [{"role": "user", "content": [text_part(prompt + _text(content))]}]
    if name is not None:
        raise InvalidRequestError(f"the model has no prompts, so none is named {name!r}")
    said = (EMBED_INSTRUCTION if instruction is None else instruction).strip()
    if said and not unicodedata.category(said[-1]).startswith("P"):
        said += "."
    return [
        {"role": "system", "content": [text_part(said)]},
        {"role": "user", "content": _parts(content)},
    ]


def rerank_messages(
    query: Content, document: Content, instruction: str | None = None, *, plain: bool = False
) -> list[dict[str, Any]]:
    """Return the conversation that asks whether a document meets a query, yes or no.

    Args:
        query, document: the pair.
        instruction: what is asked of documents; None: the card's.
        plain: the model is one of texts alone.
    """
    usual = TEXT_INSTRUCTION if plain else RERANK_INSTRUCTION
    told = f"<Instruct>: {usual if instruction is None else instruction}"
    content = [text_part(told), text_part("<Query>:"), *_parts(query)]
    content += [text_part("\n<Document>:"), *_parts(document)]
    if plain:
        pair = f"{told}\n<Query>: {_text(query)}\n<Document>: {_text(document)}"
        content = [text_part(pair)]
    return [
        {"role": "system", "content": [text_part(_JUDGE)]},
        {"role": "user", "content": content},
    ]


def contents_of(contents: Iterable[Content]) -> Iterable[Content]:
    """Return contents as they are. Raises InvalidRequestError for one in place of a list."""
    if isinstance(contents, str | Mapping) or not isinstance(contents, Iterable):
        raise InvalidRequestError("contents must be a list: of texts, or of lists of parts")
    return contents


def _text(content: Content) -> str:
    """Return the text of a content for models of texts alone."""
    texts = (
        [content] if isinstance(content, str) else [each.get("text") for each in _parts(content)]
    )
    if None in texts:
        raise InvalidRequestError("the model takes texts alone")
    return "".join(map(str, texts))


def _parts(content: Content) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text_part(content or _NOTHING)]
    given: object = content
    if not isinstance(given, list | tuple) or not all(isinstance(x, Mapping) for x in given):
        raise InvalidRequestError("a content must be a text, or a list of parts of a message")
    return [dict(part) for part in given] or [text_part(_NOTHING)]
