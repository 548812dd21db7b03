"""Sampling options of a request, validated on construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 1 << 16
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
MAX_CHOICES = 128
MAX_PREDICTION_LENGTH = 1 << 16


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request. None takes the checkpoint's generation config, else neutral.

    Attributes:
        max_tokens: most tokens to generate; None: up to the model's context.
        min_tokens: the answer does not stop before this many tokens.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        seed: makes sampling repeatable.
        stop: strings that end generation; the returned text leaves them out.
        stop_token_ids: tokens that end generation, in addition to the checkpoint's own.
        ignore_eos: do not stop at the checkpoint's end-of-sequence tokens.
        presence_penalty, frequency_penalty: in [-2, 2], over generated tokens.
        repetition_penalty: > 0, over prompt and generated tokens; 1 is neutral.
        logprobs: how many of the most likely tokens to report per generated token (the sampled one
            is always included); None reports none.
        prompt_logprobs: how many of the most likely tokens to report per prompt token (the prompt's
            own is always included). No sampling option changes them.
        prompt_logprobs_start: the first prompt token to report; less than the prompt's length, and
            only with prompt_logprobs. Earlier tokens are reused from the cache as usual.
        logit_bias: token id -> number to add to its logit, in [-100, 100].
        allowed_token_ids: the only tokens to sample.
        bad_words: texts that must not be generated.
        structured_outputs: the required form of the answer.
        n: number of choices from one prompt.
        return_routed_experts: also return the routed experts of each token (mixture-of-experts
            models only).
        prediction: text that the answer probably repeats. With drafts on, correct parts of it
            come faster; the answer does not depend on it.
        routed_experts_prompt_start: leave out the rows of the prompt's first tokens; less than the
            prompt's length, and only with return_routed_experts.
        thinking_token_budget: most tokens of the answer's thought, which then is ended; None: any
            number.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    n: int = 1
    return_routed_experts: bool = False
    routed_experts_prompt_start: int = 0
    prediction: str = ""
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check("max_tokens", self.max_tokens, int, 1)
        _check("min_tokens", self.min_tokens, int, 0)
        _check("temperature", self.temperature, float, 0.0, 100.0)
        _check("top_p", self.top_p, float, 0.0, 1.0, open_low=True)
        _check("top_k", self.top_k, int, -1)
        _check("min_p", self.min_p, float, 0.0, 1.0)
        _check("seed", self.seed, int, -(2**63), 2**63 - 1)
        _check("presence_penalty", self.presence_penalty, float, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, float, -2.0, 2.0)
        _check("repetition_penalty", self.repetition_penalty, float, 0.0, 100.0, open_low=True)
        _check("logprobs", self.logprobs, int, 0, MAX_LOGPROBS)
        _check("prompt_logprobs", self.prompt_logprobs, int, 0, MAX_LOGPROBS)
        _check("prompt_logprobs_start", self.prompt_logprobs_start, int, 0)
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise InvalidRequestError(
                "prompt_logprobs_start needs prompt_logprobs", param="prompt_logprobs_start"
            )
        _check("n", self.n, int, 1, MAX_CHOICES)
        _check("thinking_token_budget", self.thinking_token_budget, int, 0)
        self._check_logit_rules()
        self._check_experts()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings", param="stop")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequestError("stop strings must be non-empty strings", param="stop")
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, int, 0)
        if not isinstance(self.prediction, str) or len(self.prediction) > MAX_PREDICTION_LENGTH:
            raise InvalidRequestError(
                f"prediction must be a text of at most {MAX_PREDICTION_LENGTH} characters",
                param="prediction",
            )

    def _check_logit_rules(self) -> None:
        bias = self.logit_bias or {}
        if not isinstance(bias, Mapping) or len(bias) > MAX_BIASES:
            raise InvalidRequestError(
                f"logit_bias must map at most {MAX_BIASES} token ids to numbers", param="logit_bias"
            )
        for token, value in bias.items():
            _check("logit_bias", token, int, 0)
            _check("logit_bias", value, float, -100.0, 100.0)
            if value is None:
                raise InvalidRequestError("logit_bias must be numbers", param="logit_bias")
        allowed = self.allowed_token_ids
        if allowed is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(allowed))
            if not 1 <= len(allowed) <= MAX_ALLOWED_TOKENS:
                raise InvalidRequestError(
                    f"allowed_token_ids must have at least 1 and at most {MAX_ALLOWED_TOKENS} ids",
                    param="allowed_token_ids",
                )
            for token in allowed:
                _check("allowed_token_ids", token, int, 0)
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        object.__setattr__(self, "bad_words", tuple(words or ()))
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"at most {MAX_BAD_WORDS} bad words", param="bad_words")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
                raise InvalidRequestError(
                    "bad_words must be texts that are not blank and have at most "
                    f"{MAX_BAD_WORD_LENGTH} characters",
                    param="bad_words",
                )

    def _check_experts(self) -> None:
        if not isinstance(self.return_routed_experts, bool):
            raise InvalidRequestError(
                "return_routed_experts must be true or false", param="return_routed_experts"
            )
        start = self.routed_experts_prompt_start
        _check("routed_experts_prompt_start", start, int, 0)
        if start and not self.return_routed_experts:
            raise InvalidRequestError(
                "routed_experts_prompt_start needs return_routed_experts",
                param="routed_experts_prompt_start",
            )

    def with_defaults(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """Fill every None from the checkpoint's generation config; explicit values win."""
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
        if not generation_config.get("do_sample", True):
            neutral["temperature"] = 0.0
            generation_config = {
                key: value
                for key, value in generation_config.items()
                if key not in ("temperature", "top_p", "top_k")
            }
        filled = {
            name: generation_config.get(name, value)
            for name, value in neutral.items()
            if getattr(self, name) is None
        }
        return replace(self, **{k: v for k, v in filled.items() if v is not None})


def _check(
    name: str,
    value: object,
    kind: type,
    low: float,
    high: float | None = None,
    *,
    open_low: bool = False,
) -> None:
    if value is None:
        return
    number = isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        number = number or isinstance(value, float)
    if not number:
        raise FieldError(name, f"must be a number, got {value!r}")
    assert isinstance(value, int | float)
    inside = (value > low if open_low else value >= low) and (high is None or value <= high)
    if not inside:  # Also catches NaN.
        bound = f"{'more than' if open_low else 'at least'} {low:g}"
        bound += "" if high is None else f" and at most {high:g}"
        raise FieldError(name, f"must be {bound}, got {value}")
