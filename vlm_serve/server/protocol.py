"""Request bodies. Types are checked strictly ("5" is no number); ranges are checked where the value
is used, so that Python and HTTP refuse the same things with the same words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vlm_serve.errors import InvalidRequestError
from vlm_serve.sampling_params import MAX_LOGPROBS, SamplingParams
from vlm_serve.server.structured import form_of

MAX_SALT_LENGTH = 128
SALT_PATTERN = r"^[A-Za-z0-9._:=+/@-]*$"
MAX_PRIORITY = 1 << 31
DEFAULT_COMPLETION_TOKENS = 16


class RequestModel(BaseModel):
    """Unknown fields are kept aside (`model_extra`), see `fields.py`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnswerRequest(RequestModel):
    """What every request for an answer has, in whichever API's form."""

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


class GenerationRequest(AnswerRequest):
    """What chat and plain completions have in common."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_prompt_start: int | None = None

    @property
    def form_field(self) -> str:
        """The field that the answer's form comes from, if it has to have one."""
        asks = self.response_format is not None and self.response_format.get("type") != "text"
        return "response_format" if asks else "structured_outputs"

    def stream_option(self, name: str) -> bool:
        return self.stream_options is not None and bool(getattr(self.stream_options, name))

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed when stream is true", param="stream_options"
            )

    def _logit_bias(self) -> dict[int, float] | None:
        """JSON has no other keys than texts."""
        bias = self.logit_bias or {}
        for token in bias:
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise InvalidRequestError(
                    f"logit_bias: {token[:32]!r} is no token id", param="logit_bias"
                )
        return {int(token): value for token, value in bias.items()} or None

    def _check_prompt_logprobs(self) -> None:
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs is not available in a stream", param="prompt_logprobs"
            )

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        self._check_prompt_logprobs()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logit_bias=self._logit_bias(),
            allowed_token_ids=None
            if self.allowed_token_ids is None
            else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words or ()),
            structured_outputs=form_of(self.response_format, self.structured_outputs),
            n=1 if self.n is None else self.n,
            return_routed_experts=bool(self.return_routed_experts),
            routed_experts_prompt_start=self.routed_experts_prompt_start or 0,
        )


class ChatMessage(RequestModel):
    role: str = Field(max_length=64)
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(RequestModel):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class TemplateFields(RequestModel):
    """What a chat prompt is made from besides its messages."""

    tools: list[Tool] | None = Field(None, max_length=256)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatPrompt(TemplateFields):
    messages: list[ChatMessage] = Field(max_length=4096)


class EitherPrompt(TemplateFields):
    """A prompt as chat or as plain completions would make it; `prompt` is declared below this."""

    model: str | None = None
    messages: list[ChatMessage] | None = Field(None, max_length=4096)

    def chat_prompt(self, prompt: object) -> ChatPrompt | None:
        """The chat prompt, None if `prompt` was given.

        Raises InvalidRequestError for both or none.
        """
        if (prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if self.messages is None:
            return None
        fields = {name: getattr(self, name) for name in TemplateFields.model_fields}
        return ChatPrompt.model_construct(messages=self.messages, **fields)


class ChatCompletionRequest(ChatPrompt, GenerationRequest):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError that names the field which is out of range."""
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be at least 0 and at most {MAX_LOGPROBS}, got {top}",
                param="top_logprobs",
            )
        if top and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        limit = self.max_completion_tokens
        return self._sampling(
            self.max_tokens if limit is None else limit, (top or 0) if self.logprobs else None
        )


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def only_echo(self) -> bool:
        """Nothing is wanted but the prompt, for its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError that names the field which is out of range."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        # The engine makes at least one token, which is left out of the answer.
        params = self._sampling(1 if self.only_echo else limit, self.logprobs)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            return replace(params, prompt_logprobs=self.logprobs)
        return params


class TokenizeRequest(EitherPrompt):
    prompt: str | None = None
    return_token_strs: bool | None = None


class CachePrompt(EitherPrompt):
    """Unknown fields are refused: one that was meant to change the prompt would otherwise make the
    answer wrong."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | list[int] | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT_LENGTH, pattern=SALT_PATTERN)


class ProbeRequest(CachePrompt):
    pass


class PinRequest(CachePrompt):
    ttl_seconds: float


class FlushRequest(RequestModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[int]
