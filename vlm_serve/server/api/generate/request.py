"""The request body of POST /inference/v1/generate, and parsing it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.api.fields import (
    AnswerRequest,
    RequestModel,
    StreamOptions,
    Table,
    Tokens,
    Whole,
    check_stream,
)
from vlm_serve.server.api.sampling import sampling_of, with_sampling
from vlm_serve.server.api.structured import structured_outputs_of
from vlm_serve.server.api.unknown_fields import UNIMPLEMENTED
from vlm_serve.server.http.errors import renamed_params

GENERATE_REFUSED: dict[str, tuple[Any, ...]] = {
    "ec_transfer_params": ({},),
    "features": ({},),
    "kv_transfer_params": ({},),
}

SAMPLING_REFUSED: dict[str, tuple[Any, ...]] = {
    "extra_args": ({},),
    "logprob_token_ids": (),
    "prompt_logprob_start": (0,),
    "prompt_logprob_token_ids": (),
    "trace_decode_token_ids": (),
}
SAMPLING_UNIMPLEMENTED = SAMPLING_REFUSED | {
    name: neutral
    for name, neutral in UNIMPLEMENTED.items()
    if name != "spaces_between_special_tokens"  # which concerns only text
}


@with_sampling("generate")
class TokenSampling(RequestModel):
    """`sampling_params`, with the field names of `SamplingParams`."""

    prompt_logprobs: Whole | None = None
    structured_outputs: Table[Any] | None = None
    regex: str | None = None


# Internal field name -> this API's name for it, for errors.
NAMES = {name: f"sampling_params.{name}" for name in TokenSampling.model_fields} | {
    "prompt": "token_ids",
    "messages": "token_ids",
}


class GenerateRequest(AnswerRequest):
    token_ids: Tokens = Field(min_length=1)
    sampling_params: TokenSampling
    stream_options: StreamOptions | None = None

    @property
    def names(self) -> dict[str, str]:
        """The client's names of internal fields, for errors."""
        form = "structured_outputs" if self.sampling_params.regex is None else "regex"
        return NAMES | {"structured_outputs": f"sampling_params.{form}"}

    def params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        given = self.sampling_params
        with renamed_params(NAMES):
            check_stream(self.stream, self.stream_options, given.prompt_logprobs)
            form = structured_outputs_of(None, given.structured_outputs, given.regex)
            return sampling_of("generate", given, structured_outputs=form)
