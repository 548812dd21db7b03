"""Sampling options of a request, validated on construction.

A field is the whole description of an option: bounds, help, and names in each API. Request fields,
checks, errors and the table in docs/http-api.md follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.options.declared import explains_keywords, plain_number
from vlm_serve.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 1000
"""Bound of `max_logprobs`, which an engine's options set."""
MAX_BAD_WORD_LENGTH = 256
_VLLM = ("chat", "completions", "generate")
_ALL = (*_VLLM, "responses", "messages")


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """One option: how it is written and checked.

    Attributes:
        name: the field's name.
        kind: the field's annotation without `| None`.
        default: its value if nobody sets it.
        help: one phrase for the documentation.
        low, high: bounds of a number, or of each number in a list or mapping.
        above_low: the lower bound itself is excluded.
        size: smallest and largest number of entries.
        length: most characters of a text, or of each text in a list.
        names: API -> its names for the option; the first one with a value counts.
        neutral: values without effect, which a client may send to an API without the option.
    """

    name: str
    kind: str
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    above_low: bool = False
    size: tuple[int, int] | None = None
    length: int | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    neutral: tuple[Any, ...] = ()


def option(
    default: Any,
    text: str,
    low: float | None = None,
    high: float | None = None,
    *,
    apis: Sequence[str] = _VLLM,
    names: Mapping[str, tuple[str, ...]] | None = None,
    **others: Any,
) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        text: the help.
        apis: APIs with a body field of the option's own name.
        names: APIs with other names for it. An API in neither has no field that maps to it alone.
        others: further fields of `SamplingOption`.
    """
    described = {"help": text, "low": low, "high": high, "apis": apis, "names": names or {}}
    return field(default=default, metadata=described | others)


@cache
def sampling_options(params: Any) -> tuple[SamplingOption, ...]:
    """Return the options that a dataclass declares."""
    options: list[SamplingOption] = []
    for option in fields(params):
        described = dict(option.metadata)
        names = dict.fromkeys(described.pop("apis"), (option.name,)) | described.pop("names")
        kind = str(option.type).removesuffix(" | None")
        options.append(SamplingOption(option.name, kind, option.default, names=names, **described))
    return tuple(options)


@explains_keywords
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request. None takes the checkpoint's generation config, else neutral.

    Every field's help is its documentation. Raises InvalidRequestError, naming the option.
    """

    max_tokens: int | None = option(
        None,
        "longest answer in tokens; -1: up to the context. Default: -1; /v1/completions: 16",
        1,
        apis=("completions", "generate", "messages"),
        names={
            "chat": ("max_completion_tokens", "max_tokens"),
            "responses": ("max_output_tokens",),
        },
    )
    min_tokens: int = option(0, "nothing ends the answer before; at most the longest answer", 0)
    temperature: float | None = option(
        None,
        "0 is greedy. Default of this and the next two: the checkpoint's generation config",
        0,
        100,
        apis=_ALL,
    )
    top_p: float | None = option(
        None,
        "sample from the likeliest tokens with this mass; 0: take the likeliest one",
        0,
        1,
        apis=_ALL,
    )
    top_k: int | None = option(
        None, "sample from this many of the likeliest tokens; 0 and -1: from all", -1, apis=_ALL
    )
    min_p: float = option(
        0.0,
        "drop tokens less likely than this share of the likeliest one",
        0,
        1,
        apis=(*_VLLM, "responses"),
        neutral=(0, 0.0),
    )
    seed: int | None = option(None, "makes sampling repeatable", -(2**63), 2**63 - 1, apis=_ALL)
    stop: tuple[str, ...] = option(
        (),
        "a text or texts that end the answer and are not part of it",
        size=(0, 16),
        length=1024,
        apis=(*_VLLM, "responses"),
        names={"messages": ("stop_sequences",)},
        neutral=([],),
    )
    include_stop_str_in_output: bool = option(
        False,
        "the stop text or token that ends the answer is part of it; tokens are, if they are text",
        apis=("chat", "completions"),
        neutral=(False,),
    )
    skip_special_tokens: bool = option(
        True,
        "false: special tokens are part of the text",
        apis=("chat", "completions"),
        neutral=(True,),
    )
    stop_token_ids: tuple[int, ...] = option((), "tokens that end the answer", 0, neutral=([],))
    ignore_eos: bool = option(
        False,
        "the checkpoint's end tokens, as its tokenizer, `generation_config.json` and `config.json` "
        "name them, do not end the answer",
        neutral=(False,),
    )
    presence_penalty: float = option(
        0.0, "subtracted from the logit of each token generated before", -2, 2, neutral=(0, 0.0)
    )
    frequency_penalty: float = option(
        0.0, "likewise, times how often it was generated", -2, 2, neutral=(0, 0.0)
    )
    repetition_penalty: float | None = option(
        None,
        "divides the logits of tokens in prompt and answer, as in transformers; 1 is neutral",
        0,
        100,
        above_low=True,
        neutral=(1, 1.0),
    )
    logprobs: int | None = option(
        None,
        "how many alternatives to report per token, at most `--max-logprobs` (20); null reports "
        "none",
        0,
        MAX_LOGPROBS,
        apis=("completions", "generate"),
    )
    logprob_token_ids: tuple[int, ...] = option(
        (),
        "tokens whose log-probabilities are reported beside those of `logprobs`, which it needs",
        0,
        apis=(),
        size=(0, 1024),
    )
    prompt_logprobs: int | None = option(
        None,
        "how many alternatives to report per prompt token, at most `--max-logprobs` (20); not in a "
        "stream",
        0,
        MAX_LOGPROBS,
    )
    prompt_logprobs_start: int = option(
        0,
        "the first prompt token whose logprobs are reported (also by `echo`), null before it; less "
        "than the prompt's length, only with `prompt_logprobs` or `echo` and `logprobs`",
        0,
    )
    truncate_prompt_tokens: int | None = option(
        None,
        "only this many tokens at the prompt's end are used; -1: as many as the context leaves "
        "beside `max_tokens`. Media are never cut: refused, unless all fits with -1",
        -1,
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        "token id -> number that is added to its logit",
        -100,
        100,
        size=(0, 1024),
        neutral=({},),
    )
    allowed_token_ids: tuple[int, ...] | None = option(
        None, "nothing else is sampled", 0, size=(1, 1 << 16)
    )
    bad_words: tuple[str, ...] = option(
        (),
        "texts that are not generated: the last token of each is banned after the others",
        size=(0, 256),
        length=MAX_BAD_WORD_LENGTH,
    )
    structured_outputs: StructuredOutputs | None = option(
        None,
        "one of `json`, `json_object`, `regex`, `choice`, `grammar` (EBNF) and "
        "`structural_tag`, see below",
    )
    n: int = option(1, "number of answers", 1, 128, neutral=(1,))
    return_routed_experts: bool = option(
        False,
        "mixture-of-experts models: adds `routed_experts` to every choice, see below; refused for "
        "dense models",
        neutral=(False,),
    )
    routed_experts_prompt_start: int = option(
        0,
        "leaves out the rows of the prompt's first tokens; less than the prompt's length, only "
        "with `return_routed_experts`",
        0,
    )
    thinking_token_budget: int | None = option(
        None,
        "most tokens of the thought (/v1/messages: `thinking.budget_tokens`). Then the server "
        "writes `--thinking-budget-message`, if there is one, and `</think>`, and the answer "
        "follows; these tokens count as generated",
        0,
        apis=(*_VLLM, "responses"),
    )
    prediction: str = option("", "text that the answer probably repeats", length=1 << 16, apis=())

    def __post_init__(self) -> None:
        if self.max_tokens == -1:
            object.__setattr__(self, "max_tokens", None)
        declared: Any = type(self)
        for option in sampling_options(declared):
            value = getattr(self, option.name)
            given = value
            if option.kind.startswith("tuple"):
                value = _entries(value, option.default)
            value = plain_number(value)
            if value is not given:
                object.__setattr__(self, option.name, value)
            if value is not None:
                _check(option, value)
        if self.truncate_prompt_tokens == 0:
            raise FieldError("truncate_prompt_tokens", "must be at least 1, or -1")
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise FieldError("prompt_logprobs_start", "needs prompt_logprobs")
        if self.logprob_token_ids and self.logprobs is None:
            raise FieldError("logprob_token_ids", "needs logprobs")
        if self.routed_experts_prompt_start and not self.return_routed_experts:
            raise FieldError("routed_experts_prompt_start", "needs return_routed_experts")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if not all(word.strip() for word in self.bad_words):
            raise FieldError("bad_words", "must be texts that are not blank")

    def kept_prompt_tokens(self, max_model_len: int) -> int | None:
        """Return how many tokens at the prompt's end are used; None: all of them."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(max_model_len - max(self.max_tokens or 1, self.min_tokens), 1)

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


def _entries(value: Any, default: Any) -> Any:
    """Return a list's entries as a tuple; a text is the only entry of its list."""
    if value is None:
        return default
    return (value,) if isinstance(value, str) else tuple(map(plain_number, value))


def _check(option: SamplingOption, value: Any) -> None:
    """Check a value's type and bounds. Raises FieldError."""
    name = option.name
    if option.kind == "bool" and not isinstance(value, bool):
        raise FieldError(name, "must be true or false")
    if option.kind.startswith("Mapping") and not isinstance(value, Mapping):
        raise FieldError(name, "must map token ids to numbers")
    if option.kind == "StructuredOutputs" and not isinstance(value, StructuredOutputs):
        raise FieldError(name, f"must be a StructuredOutputs, got {type(value).__name__}")
    if option.size is not None and not option.size[0] <= len(value) <= option.size[1]:
        least = f"at least {option.size[0]} and " * bool(option.size[0])
        raise FieldError(name, f"must have {least}at most {option.size[1]} entries")
    if option.kind in ("int", "float"):
        _check_number(option, value)
    elif option.kind.startswith("tuple[int"):
        for token in value:
            _check_number(option, token)
    elif option.kind.startswith("Mapping"):
        for token, bias in value.items():
            if not _is_number(token, whole=True) or token < 0:
                raise FieldError(name, f"must have token ids as keys, got {token!r}")
            _check_number(option, bias)
    elif "str" in option.kind:
        for text in value if option.kind.startswith("tuple") else (value,):
            _check_text(option, text)


def _check_text(option: SamplingOption, text: object) -> None:
    is_list = option.kind.startswith("tuple")
    if not isinstance(text, str) or (is_list and not text):
        raise FieldError(
            option.name, f"must be {'texts that are not empty' if is_list else 'text'}"
        )
    if option.length is not None and len(text) > option.length:
        raise FieldError(option.name, f"must have at most {option.length} characters")


def _is_number(value: object, *, whole: bool) -> bool:
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool)


def _check_number(option: SamplingOption, value: Any) -> None:
    whole = option.kind == "int" or option.kind.startswith("tuple[int")
    if not _is_number(value, whole=whole):
        raise FieldError(option.name, f"must be a number, got {value!r}")
    low, high = option.low, option.high
    above = low is None or (value > low if option.above_low else value >= low)
    if above and (high is None or value <= high):
        return
    # NaN compares as false, so it ends up here.
    bound = f"{'more than' if option.above_low else 'at least'} {low:g}"
    bound += "" if high is None else f" and at most {high:g}"
    raise FieldError(option.name, f"must be {bound}, got {value}")
