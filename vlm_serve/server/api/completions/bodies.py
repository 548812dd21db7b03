"""Response bodies in OpenAI's format; docs/http-api.md lists the additions."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from vlm_serve.server.api.bodies import (
    CacheReportBody,
    CompletionLogprobs,
    Optional,
    PromptLogprobsBody,
    UsageBody,
)


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: Optional[int | str] = None
    token_ids: Optional[list[int]] = None
    prompt_token_ids: Optional[list[int]] = None
    prompt_logprobs: Optional[PromptLogprobsBody] = None
    routed_experts: Optional[str] = None
    routed_experts_gaps: Optional[list[tuple[int, int]]] = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    cache_report: Optional[CacheReportBody | list[CacheReportBody]] = None
