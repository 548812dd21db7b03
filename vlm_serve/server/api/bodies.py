"""Models that the response bodies of several APIs share, and the reports made of them."""

from __future__ import annotations

import base64
import dataclasses
import io
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field

from vlm_serve.engine.requests.outputs import CacheReport, Delta, Usage
from vlm_serve.preprocess.identity.prompt import Prompt

T = TypeVar("T")

# A field that OpenAI's API lacks or sends only where it applies. It is omitted when null.
Optional = Annotated[T | None, Field(exclude_if=lambda value: value is None)]


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SegmentBody(BaseModel):
    start: int
    end: int
    source: str


class PromptMediaBody(BaseModel):
    offset: int
    length: int
    kind: str
    hash: str
    source: str


class CacheReportBody(BaseModel):
    prompt_tokens: int
    kv_boundary: int
    state_boundary: int
    boundary: int
    tiers: dict[str, int]
    media_decoded: int
    media_encoded: int
    media_skipped: int
    media_cut_short: int
    media_repeated: int
    reason: str
    experts_missing: int
    logprobs_reused: int
    joined_tokens: int
    joined_ms: float
    answer_tokens: int
    segments: list[SegmentBody]
    media: list[PromptMediaBody]
    snapshots: list[int]
    boundary_key: str | None
    resumed: Optional[int] = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetails


def usage_body(usage: Usage, *prompts: Prompt) -> UsageBody:
    """Return token counts; placeholder tokens of media are counted by modality."""
    spans = [span for prompt in prompts for span in prompt.spans]
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=usage.cached_tokens,
            image_tokens=sum(span.end - span.start for span in spans if span.modality == "image"),
            video_tokens=sum(span.end - span.start for span in spans if span.modality == "video"),
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
        ),
    )


def add_usage(parts: list[Usage]) -> Usage:
    """Return the total usage of a request's prompts."""
    return Usage(*map(sum, zip(*map(dataclasses.astuple, parts), strict=True)))


def routed_experts_fields(delta: Delta) -> dict[str, Any]:
    """Return the routed experts' fields for the end of a choice; empty if not requested.

    The rows are the base64 text of an `.npy` file; a second field lists their gaps, if any.
    """
    if delta.routed_experts is None:
        return {}
    file = io.BytesIO()
    np.save(file, delta.routed_experts, allow_pickle=False)
    fields: dict[str, Any] = {"routed_experts": base64.b64encode(file.getvalue()).decode()}
    if delta.routed_experts_gaps:
        fields["routed_experts_gaps"] = list(delta.routed_experts_gaps)
    return fields


def cache_report_fields(report: CacheReport) -> dict[str, Any]:
    fields = dataclasses.asdict(report)
    if not report.resumed:
        del fields["resumed"]
    return fields


def cache_report_body(report: CacheReport | None) -> CacheReportBody | None:
    return None if report is None else CacheReportBody(**cache_report_fields(report))
