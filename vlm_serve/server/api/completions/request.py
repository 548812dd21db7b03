"""The request body of POST /v1/completions, and parsing it."""

from __future__ import annotations

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.api.fields import GenerationRequest, Items, Tokens, Whole, check_stream
from vlm_serve.server.api.sampling import sampling_of, with_sampling
from vlm_serve.server.api.structured import structured_outputs_of

MAX_PROMPTS = 128
DEFAULT_COMPLETION_TOKENS = 16


@with_sampling("completions")
class CompletionRequest(GenerationRequest):
    prompt: str | Items[str] | Tokens | Items[Tokens]
    max_tokens: Whole | None = None
    logprobs: Whole | None = None
    echo: bool | None = None

    @property
    def only_echo(self) -> bool:
        """Only the prompt is wanted, for its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidRequestError: a field is out of range; the error names it.
        """
        check_stream(self.stream, self.stream_options, self.prompt_logprobs)
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        echoed = self.echo and self.prompt_logprobs is None
        return sampling_of(
            "completions",
            self,
            # The engine generates at least one token; the response omits it.
            max_tokens=1 if self.only_echo else limit,
            prompt_logprobs=self.logprobs if echoed else self.prompt_logprobs,
            structured_outputs=structured_outputs_of(
                self.response_format, self.structured_outputs, self.regex
            ),
        )


def checked_prompts(conversation: Conversation) -> list[str] | list[list[int]]:
    """Return the prompts of a request.

    Raises:
        InvalidRequestError: there are no prompts, too many, or empty ones.
    """
    prompts = conversation.prompts
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts per request", param="prompt")
    return prompts
