"""The request body of POST /inference/v1/generate, and parsing it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.api.fields import (
    MAX_PRIORITY,
    MAX_SALT_LENGTH,
    SALT_PATTERN,
    RequestModel,
    SamplingFields,
    StreamOptions,
    Tokens,
    check_stream,
    stop_texts,
    token_biases,
)
from vlm_serve.server.api.structured import structured_outputs_of
from vlm_serve.server.api.unknown_fields import UNIMPLEMENTED
from vlm_serve.server.http.errors import renamed_params

GENERATE_REFUSED: dict[str, tuple[Any, ...]] = {
    "ec_transfer_params": ({},),
    "features": ({},),
    "kv_transfer_params": ({},),
}

_ONLY_FOR_TEXT = (
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
SAMPLING_REFUSED: dict[str, tuple[Any, ...]] = {
    "extra_args": ({},),
    "logprob_token_ids": (),
    "prompt_logprob_start": (0,),
    "prompt_logprob_token_ids": (),
    "trace_decode_token_ids": (),
}
SAMPLING_UNIMPLEMENTED = SAMPLING_REFUSED | {
    name: neutral for name, neutral in UNIMPLEMENTED.items() if name not in _ONLY_FOR_TEXT
}


class TokenSampling(SamplingFields):
    """`sampling_params`, with the field names of `SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    logprobs: int | None = None

    def params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequestError: a field is out of range; the error names it.
        """
        given = {
            name: value
            for name in type(self).model_fields
            if (value := getattr(self, name)) is not None
        }
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return SamplingParams(
            **given
            | {
                "stop": stop_texts(self.stop),
                "logit_bias": token_biases(self.logit_bias),
                "structured_outputs": structured_outputs_of(None, self.structured_outputs),
            }
        )


# Internal field name -> this API's name for it, for errors.
NAMES = {name: f"sampling_params.{name}" for name in TokenSampling.model_fields} | {
    "prompt": "token_ids",
    "messages": "token_ids",
}


class GenerateRequest(RequestModel):
    token_ids: Tokens = Field(min_length=1)
    sampling_params: TokenSampling
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT_LENGTH, pattern=SALT_PATTERN)
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    cache_report: bool | None = None

    def params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        with renamed_params(NAMES):
            check_stream(self.stream, self.stream_options, self.sampling_params.prompt_logprobs)
            return self.sampling_params.params()
