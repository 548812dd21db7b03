"""Response bodies in vLLM's format."""

from __future__ import annotations

from pydantic import BaseModel

from vlm_serve.server.api.bodies import (
    CacheReportBody,
    Optional,
    PromptLogprobsBody,
    UsageBody,
)


class TokenRival(BaseModel):
    token: str
    logprob: float
    bytes: None = None


class GeneratedToken(TokenRival):
    top_logprobs: list[TokenRival]


class GeneratedLogprobs(BaseModel):
    content: list[GeneratedToken]


class GeneratedChoice(BaseModel):
    index: int
    logprobs: GeneratedLogprobs | None = None
    finish_reason: str | None
    token_ids: list[int]
    routed_experts: str | None = None
    routed_experts_gaps: Optional[list[tuple[int, int]]] = None


class Generated(BaseModel):
    request_id: str
    model: str
    created: int
    choices: list[GeneratedChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobsBody | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    cache_report: Optional[CacheReportBody] = None
