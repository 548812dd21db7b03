"""Models that the response bodies of several APIs share."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, Field

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
