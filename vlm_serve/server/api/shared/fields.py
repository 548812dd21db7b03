"""Fields that several APIs share: of request bodies, then the models of response bodies.

Types of requests are checked strictly: "5" is not a number. Ranges are checked where values are
used, so that Python and HTTP report the same errors.
"""

from __future__ import annotations

import base64
import dataclasses
import io
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from vlm_serve.engine.requests.outputs import CacheReport, Delta, Usage
from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.prompt import Prompt

MAX_SALT_LENGTH = 128
SALT_PATTERN = r"^[A-Za-z0-9._:=+/@-]*$"
MAX_PRIORITY = 1 << 31
MAX_FIELDS = 256
MAX_ENTRIES = 1024
MAX_ITEMS = 1 << 16
MAX_TOKENS = 1 << 24
MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_ANSWER_ID = 256

T = TypeVar("T")


def _check_num_entries(value: Any) -> Any:
    """Refuse an object with too many entries before Pydantic validates them all."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError(
            "too_long", "should have at most {most} entries", {"most": MAX_ENTRIES}
        )
    return value


def _whole(value: Any) -> Any:
    """Return a whole number as an int; clients without integers write 8.0 for 8."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, perhaps written as 8.0."""

Items = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]
"""A list of bounded length; only its first invalid item is reported. Every list in a request is
one."""

Tokens = Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)]
"""Token ids of a prompt; the context sets a tighter limit."""

Table = Annotated[dict[str, T], Field(max_length=MAX_ENTRIES), BeforeValidator(_check_num_entries)]
"""An object with a bounded number of entries. Every object without a model is one."""


Verbosity = Literal["low", "medium", "high"]


class RequestModel(BaseModel):
    """A part of a request body. Unknown fields are kept in `model_extra`, see
    `unknown_fields.py`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_num_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError(
                "too_long", "should have at most {most} fields", {"most": MAX_FIELDS}
            )
        return value


class ExactModel(RequestModel):
    """A part of a request body whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnswerRequest(RequestModel):
    """Fields of every request for an answer, in any API."""

    model: str | None = None
    stream: bool | None = None
    priority: Whole | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache_salt: str | None = Field(None, max_length=MAX_SALT_LENGTH, pattern=SALT_PATTERN)
    cache_report: bool | None = None
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_.:-]{1,128}$")

    @property
    def tells_media(self) -> bool:
        """True if the response tells hashes of the prompt's media."""
        return bool(self.cache_report)

    @property
    def only_prompt(self) -> bool:
        """True if the prompt is to be computed without an answer. The engine generates at least one
        token all the same, which the response leaves out."""
        return False

    @property
    def tells_progress(self) -> bool:
        """True if the response is a stream that tells how much of the prompt has been processed."""
        return False

    def counted(self, usage: Usage) -> Usage:
        """Return what the response says of the engine's counts."""
        return dataclasses.replace(usage, completion_tokens=0) if self.only_prompt else usage


class PromptCacheOptions(RequestModel):
    """Options for the cache in OpenAI's form; the reader of conversations acts upon them."""

    mode: str | None = None
    ttl: str | None = None

    @property
    def ignored(self) -> list[str]:
        """Places of the members without effect."""
        return [f"prompt_cache_options.{name}" for name in self.model_extra or ()]


def check_stream(
    stream: bool | None, stream_options: StreamOptions | None, prompt_logprobs: int | None
) -> None:
    """Check options that only streams have, or only complete responses.

    Raises:
        InvalidRequestError: an option does not fit `stream`.
    """
    if stream_options is not None and not stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    if stream and prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs is not available in a stream", param="prompt_logprobs"
        )


class GenerationRequest(AnswerRequest):
    """Fields that chat and plain completions share."""

    stream_options: StreamOptions | None = None
    response_format: Table[Any] | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Whole | None = None
    structured_outputs: Table[Any] | None = None
    regex: str | None = None
    return_progress: bool | None = None

    @property
    def tells_progress(self) -> bool:
        return bool(self.return_progress and self.stream)

    @property
    def form_field(self) -> str:
        """The field that constrains the answer's text, if any does."""
        if self.regex is not None:
            return "regex"
        given = self.response_format
        constrained = given is not None and given.get("type") != "text"
        return "response_format" if constrained else "structured_outputs"


# A field that OpenAI's API lacks or sends only where it applies. It is omitted when null.
Optional = Annotated[T | None, Field(exclude_if=lambda value: value is None)]


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0
    cache_write_tokens: int = 0
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
    width: int
    height: int
    item: int
    item_hash: str


class KeptMarkBody(BaseModel):
    position: int
    kept_tokens: int
    seconds: float


class WeightChangeBody(BaseModel):
    choice: int
    token: int
    weights: str


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
    marks: Optional[list[KeptMarkBody]] = None
    weights: Optional[str] = None
    weight_changes: Optional[list[WeightChangeBody]] = None
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


def errors_of(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the description of a route's error responses."""
    return {"4XX": {"model": body}, "5XX": {"model": body}}


ERRORS = errors_of(ErrorBody)


def usage_body(usage: Usage, *prompts: Prompt) -> UsageBody:
    """Return token counts; placeholder tokens of media are counted by modality."""
    spans = [span for prompt in prompts for span in prompt.spans]
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=usage.cached_tokens,
            cache_write_tokens=usage.written_tokens,
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
    return type(parts[0])(*map(sum, zip(*map(dataclasses.astuple, parts), strict=True)))


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
    for name in ("marks", "weights", "weight_changes", "resumed"):
        if not fields[name]:
            del fields[name]
    return fields


def cache_report_body(report: CacheReport | None) -> CacheReportBody | None:
    return None if report is None else CacheReportBody(**cache_report_fields(report))
