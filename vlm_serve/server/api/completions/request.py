"""The body of POST /v1/completions, and what it asks for."""

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
        """Nothing is wanted but the prompt, for its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        echoed = self.echo and self.prompt_logprobs is None
        return self.logprobs if echoed else self.prompt_logprobs

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError that names the field which is out of range."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        # The engine makes at least one token, which is left out of the answer.
        return self.all_sampling(1 if self.only_echo else limit, self.logprobs)

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list. Raises InvalidRequestError for none, too many or empty ones."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given or not all(given):
            raise InvalidRequestError("prompt must not be empty", param="prompt")
        if len(given) > MAX_PROMPTS:
            raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts per request", param="prompt")
        prompts: list[str] | list[list[int]] = given
        return prompts
