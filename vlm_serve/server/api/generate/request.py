"""The request body of POST /inference/v1/generate, and parsing it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.api.fields import (
    AnswerRequest,
    RequestModel,
    StreamOptions,
    Tokens,
    Whole,
    check_stream,
)
from vlm_serve.server.api.sampling import sampling_of, with_sampling
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


@with_sampling("generate")
class TokenSampling(RequestModel):
    """`sampling_params`, with the field names of `SamplingParams`."""

    prompt_logprobs: Whole | None = None


# Internal field name -> this API's name for it, for errors.
NAMES = {name: f"sampling_params.{name}" for name in TokenSampling.model_fields} | {
    "prompt": "token_ids",
    "messages": "token_ids",
}


class GenerateRequest(AnswerRequest):
    token_ids: Tokens = Field(min_length=1)
    sampling_params: TokenSampling
    stream_options: StreamOptions | None = None

    def params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        with renamed_params(NAMES):
            check_stream(self.stream, self.stream_options, self.sampling_params.prompt_logprobs)
            return sampling_of("generate", self.sampling_params)
