"""The request body of POST /v1/completions, and parsing it."""

from __future__ import annotations

from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.api.fields import GenerationRequest, Items, Tokens

MAX_PROMPTS = 128
DEFAULT_COMPLETION_TOKENS = 16


class CompletionRequest(GenerationRequest):
    prompt: str | Items[str] | Tokens | Items[Tokens]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def only_echo(self) -> bool:
        """Only the prompt is wanted, for its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        echoed = self.echo and self.prompt_logprobs is None
        return self.logprobs if echoed else self.prompt_logprobs

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequestError: a field is out of range; the error names it.
        """
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        # The engine generates at least one token; the response omits it.
        return self.all_sampling(1 if self.only_echo else limit, self.logprobs)

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts as a list.

        Raises:
            InvalidRequestError: there are no prompts, too many, or empty ones.
        """
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given or not all(given):
            raise InvalidRequestError("prompt must not be empty", param="prompt")
        if len(given) > MAX_PROMPTS:
            raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts per request", param="prompt")
        prompts: list[str] | list[list[int]] = given
        return prompts
