"""Response bodies, in the form of the OpenAI API; additions are named in the docs."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

T = TypeVar("T")

# A field that the OpenAI API does not have, or has only where it applies: left out when it is null.
Optional = Annotated[T | None, Field(exclude_if=lambda value: value is None)]


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CacheReportBody(BaseModel):
    prompt_tokens: int
    kv_boundary: int
    state_boundary: int
    boundary: int
    tiers: dict[str, int]
    media_decoded: int
    media_encoded: int
    media_skipped: int
    reason: str
    experts_missing: int


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: Optional[str] = None
    reasoning_content: Optional[str] = None
    tool_calls: Optional[list[ToolCall]] = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: Optional[int | str] = None
    token_ids: Optional[list[int]] = None
    routed_experts: Optional[str] = None
    routed_experts_gaps: Optional[list[tuple[int, int]]] = None


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    cache_report: Optional[CacheReportBody] = None
    prompt_token_ids: Optional[list[int]] = None
    prompt_logprobs: Optional[PromptLogprobsBody] = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


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


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vlm-serve"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Optional[list[str]] = None


class Detokenized(BaseModel):
    prompt: str


class Pinned(BaseModel):
    object: Literal["cache.pin"] = "cache.pin"
    prompt_tokens: int
    pinned_tokens: int


class Flushed(BaseModel):
    object: Literal["cache.flush"] = "cache.flush"


class CacheNode(BaseModel):
    key: str
    parent: str
    start: int
    end: int
    tail: bool
    block: int
    pins: int
    hits: int
    exact: bool
    media: bool
    snapshot: str | None
    snapshot_hits: int
    num_bytes: int


class CacheTree(BaseModel):
    object: Literal["cache.tree"] = "cache.tree"
    total: int
    offset: int
    nodes: list[CacheNode]


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetails
