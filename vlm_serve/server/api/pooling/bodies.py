"""Response bodies of POST /v1/embeddings (OpenAI's), /v1/rerank and /v1/score (vLLM's)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from vlm_serve.server.api.bodies import CacheReportBody, Optional


class PoolingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    cached_tokens: int


class Pooled(BaseModel):
    """The fields that all three bodies share. Reports are those of the prompts, in their order."""

    id: str
    model: str
    usage: PoolingUsage
    cache_report: Optional[list[CacheReportBody]] = None


class Embedding(BaseModel):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class Embeddings(Pooled):
    object: Literal["list"] = "list"
    data: list[Embedding]


class RerankResult(BaseModel):
    index: int
    relevance_score: float
    document: Optional[dict[str, Any]] = None


class Reranked(Pooled):
    results: list[RerankResult]


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(Pooled):
    object: Literal["list"] = "list"
    created: int
    data: list[Score]
