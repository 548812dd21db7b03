"""Fields that the request bodies of several APIs share.

Types are checked strictly: "5" is not a number. Ranges are checked where values are used, so that
Python and HTTP report the same errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from vlm_serve.errors import InvalidRequestError
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.api.structured import structured_outputs_of

MAX_SALT_LENGTH = 128
SALT_PATTERN = r"^[A-Za-z0-9._:=+/@-]*$"
MAX_PRIORITY = 1 << 31
MAX_FIELDS = 256
MAX_ENTRIES = 1024
MAX_ITEMS = 1 << 16
MAX_TOKENS = 1 << 24
MAX_MESSAGES = 4096
MAX_TOOLS = 256

T = TypeVar("T")


def _check_num_entries(value: Any) -> Any:
    """Refuse an object with too many entries before Pydantic validates them all."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise PydanticCustomError(
            "too_long", "should have at most {most} entries", {"most": MAX_ENTRIES}
        )
    return value


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


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnswerRequest(RequestModel):
    """Fields of every request for an answer, in any API."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache_salt: str | None = Field(None, max_length=MAX_SALT_LENGTH, pattern=SALT_PATTERN)
    cache_report: bool | None = None
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_.:-]{1,128}$")

    def sampling(self, **others: Any) -> SamplingParams:
        """Return the sampling parameters, with others added.

        Raises:
            InvalidRequestError: a field is out of range; the error names it.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            **others,
        )


def stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def token_biases(bias: dict[str, float] | None) -> dict[int, float] | None:
    """Return `logit_bias` by token id; in JSON, all keys are strings.

    Raises:
        InvalidRequestError: a key is not a token id.
    """
    for token in bias or {}:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidRequestError(
                f"logit_bias: {token[:32]!r} is not a token id", param="logit_bias"
            )
    return {int(token): value for token, value in (bias or {}).items()} or None


class SamplingFields(RequestModel):
    """Fields with the names of `SamplingParams`, in every API that follows vLLM."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    min_p: float | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    logit_bias: Table[float] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int | None = None
    structured_outputs: Table[Any] | None = None
    return_routed_experts: bool | None = None
    routed_experts_prompt_start: int | None = None
    thinking_token_budget: int | None = None


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


class GenerationRequest(AnswerRequest, SamplingFields):
    """Fields that chat and plain completions share."""

    stream_options: StreamOptions | None = None
    response_format: Table[Any] | None = None
    return_token_ids: bool | None = None

    @property
    def form_field(self) -> str:
        """The field that constrains the answer's text, if any does."""
        given = self.response_format
        constrained = given is not None and given.get("type") != "text"
        return "response_format" if constrained else "structured_outputs"

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Number of alternatives per prompt token; None: no prompt logprobs."""
        return self.prompt_logprobs

    def stream_option(self, name: str) -> bool:
        return self.stream_options is not None and bool(getattr(self.stream_options, name))

    def all_sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters from all fields. It raises as `sampling` does."""
        check_stream(self.stream, self.stream_options, self.prompt_logprobs)
        return self.sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            min_p=self.min_p or 0.0,
            stop=stop_texts(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logprobs=logprobs,
            prompt_logprobs=self.wanted_prompt_logprobs,
            prompt_logprobs_start=self.prompt_logprobs_start or 0,
            logit_bias=token_biases(self.logit_bias),
            allowed_token_ids=None
            if self.allowed_token_ids is None
            else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words or ()),
            structured_outputs=structured_outputs_of(self.response_format, self.structured_outputs),
            n=1 if self.n is None else self.n,
            return_routed_experts=bool(self.return_routed_experts),
            routed_experts_prompt_start=self.routed_experts_prompt_start or 0,
            thinking_token_budget=self.thinking_token_budget,
        )
