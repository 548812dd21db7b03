"""Responses of pooling requests, made of the vectors of their prompts."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from vlm_serve.engine.outputs import Delta
from vlm_serve.engine.pooling import Vector, embedding_of, score_of
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import AnswerStream, Event
from vlm_serve.server.api.pooling.bodies import (
    Embedding,
    Embeddings,
    PoolingUsage,
    Reranked,
    RerankResult,
    Score,
    Scores,
)
from vlm_serve.server.api.pooling.request import EmbeddingsRequest, RerankRequest, content_of
from vlm_serve.server.api.reports import add_usage, cache_report_body


@dataclass
class PooledAnswer(AnswerStream):
    """The answer to a pooling request, which is never a stream.

    Attributes:
        generations: one per prompt.
        make: makes the body of the vectors in the order of prompts, and of the fields that all
            bodies share.
        response_id, model: of the response.
        reports: whether it has the prompts' cache reports.
    """

    generations: Sequence[Generation]
    make: Callable[[list[Vector], dict[str, Any]], BaseModel]
    response_id: str
    model: str
    reports: bool
    _vectors: dict[int, Vector] = field(default_factory=dict)

    def push(self, prompt: int, delta: Delta) -> list[Event]:
        if delta.vector is not None:
            self._vectors[prompt] = delta.vector
        return []

    def result(self) -> BaseModel:
        usage = add_usage([generation.usage for generation in self.generations])
        shared: dict[str, Any] = {
            "id": self.response_id,
            "model": self.model,
            "usage": PoolingUsage(
                prompt_tokens=usage.prompt_tokens,
                total_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
            ),
        }
        if self.reports:
            found = [cache_report_body(each.cache_report) for each in self.generations]
            shared["cache_report"] = [each for each in found if each is not None]
        return self.make([each for _, each in sorted(self._vectors.items())], shared)


def embeddings_body(
    body: EmbeddingsRequest, vectors: list[Vector], shared: dict[str, Any]
) -> Embeddings:
    """Return the embeddings of vectors, as numbers or as base64 of little-endian float32."""
    made = [embedding_of(each, body.dimensions) for each in vectors]
    coded: list[list[float] | str] = [
        base64.b64encode(each.astype("<f4").tobytes()).decode()
        if body.encoding_format == "base64"
        else each.tolist()
        for each in made
    ]
    data = [Embedding(index=index, embedding=each) for index, each in enumerate(coded)]
    return Embeddings(data=data, **shared)


def rerank_body(body: RerankRequest, vectors: list[Vector], shared: dict[str, Any]) -> Reranked:
    """Return the documents' scores, the best first."""
    results = [
        RerankResult(
            index=index,
            relevance_score=score_of(vector),
            document=_shown(body, index) if body.return_documents else None,
        )
        for index, vector in enumerate(vectors)
    ]
    results.sort(key=lambda each: -each.relevance_score)
    return Reranked(results=results[: body.top_n], **shared)


def _shown(body: RerankRequest, index: int) -> dict[str, Any]:
    content = content_of(body.documents[index])
    return {"text": content} if isinstance(content, str) else {"content": content}


def scores_body(vectors: list[Vector], shared: dict[str, Any]) -> Scores:
    """Return the scores of pairs, in their order."""
    data = [Score(index=index, score=score_of(each)) for index, each in enumerate(vectors)]
    return Scores(data=data, created=int(time.time()), **shared)
