"""Answers in Python: what a finished request returns, and its text split as over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_serve.cache.experts import Rows
from vlm_serve.engine.requests.outputs import (
    CacheReport,
    Delta,
    FinishReason,
    PromptLogprobs,
    Usage,
)
from vlm_serve.engine.requests.pooling import Vector
from vlm_serve.engine.requests.request import NextTurn
from vlm_serve.engine.requests.thought import Thought
from vlm_serve.errors import VlmServeError
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.output_parser import OutputParser, ParsedTurn, message_of
from vlm_serve.server.answers.pieces import ToolForm, Tools


@dataclass(frozen=True, slots=True)
class Choice:
    """One of `n` answers to a prompt; fields as in `Output`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None = None
    stop_reason: int | str | None = None
    routed_experts: Rows | None = field(default=None, compare=False)
    routed_experts_gaps: tuple[tuple[int, int], ...] = ()
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def __repr__(self) -> str:
        return _short("Choice", self, f"completion_tokens={len(self.token_ids)}")


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request. Its `repr` is one line; all else is in the attributes.

    Attributes:
        text: the answer (of the first choice) without its thought and its tool calls; "" if the
            answer ended inside the thought.
        token_ids: generated token ids, those of the thought and an end-of-sequence token included.
        prompt_token_ids: the prompt with its media placeholders expanded.
        finish_reason: "stop", "length" or "abort".
        logprobs: per generated token a dict token id -> log-probability; None if not requested.
        usage: prompt_tokens, completion_tokens (of all choices), cached_tokens,
            written_tokens.
        cache_report: what was reused, and why no more.
        choices: all `n` choices, the first one included.
        routed_experts: expert ids `[tokens, layers, top_k]` of prompt and answer, from
            `routed_experts_prompt_start` up to the last token but one; None if not requested.
            uint8 up to 256 experts, else uint16.
        routed_experts_gaps: (first, last + 1) positions of cached tokens without recorded rows;
            their rows are zero.
        prompt_logprobs: of the prompt's tokens from `prompt_logprobs_start` on, except the first
            token; None if not requested.
        vector: of the prompt, from an engine that pools.
        reasoning: the thought of the first choice; None if there is none.
        tool_calls: calls of the first choice in OpenAI's form, `{"id", "type", "function": {"name",
            "arguments"}}` with JSON in `arguments`; empty without the option `tools`.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    cache_report: CacheReport
    logprobs: list[dict[int, float]] | None = None
    stop_reason: int | str | None = None
    choices: list[Choice] = field(default_factory=list)
    routed_experts: Rows | None = field(default=None, compare=False)
    routed_experts_gaps: tuple[tuple[int, int], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
    vector: Vector | None = field(default=None, compare=False)
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as the message that the next turn of the conversation gives back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        return message | ({"tool_calls": self.tool_calls} if self.tool_calls else {})

    def __repr__(self) -> str:
        usage = self.usage
        counts = f"prompt_tokens={usage.prompt_tokens}, cached_tokens={usage.cached_tokens}"
        counts += f", completion_tokens={usage.completion_tokens}"
        if len(self.choices) > 1:
            counts += f", choices={len(self.choices)}"
        return _short("Output", self, counts)


_SHOWN = 200
"""Characters of a text in a `repr`."""


def _short(name: str, answer: Output | Choice, counts: str) -> str:
    """Return the line by which a notebook shows an answer."""
    calls = [call["function"]["name"] for call in answer.tool_calls]
    shown = [f"text={_cut(answer.text)!r}"]
    if answer.reasoning:
        shown.append(f"reasoning={_cut(answer.reasoning)!r}")
    if calls:
        shown.append(f"tool_calls={calls}")
    return f"{name}({', '.join(shown)}, finish_reason={answer.finish_reason!r}, {counts})"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


@dataclass(frozen=True, slots=True)
class TextForm:
    """How the text of an answer is split.

    Attributes:
        thought: how the answer may think; None: its text stays whole.
        continued: the answer continues the prompt's last message.
        tools: parameter schemas of the functions that it may call, by name; None: calls stay in the
            text.
        tool_form: syntax of the calls.
    """

    thought: Thought | None = None
    continued: bool = False
    tools: Tools | None = None
    tool_form: ToolForm = "qwen3_xml"

    def parser(self) -> OutputParser:
        """Return a new parser for one choice."""
        opened = None if self.thought is None else self.thought.opened
        return OutputParser(
            reasoning=opened, continued=self.continued, tools=self.tools, form=self.tool_form
        )

    def next_turn(self, prompt: Prompt) -> NextTurn | None:
        """Return the next turn of a caller who sends text and reasoning back."""
        if prompt.next_turn is None:
            return None
        kind = "chat" if self.tools is None else "agent"
        return ParsedTurn(kind, prompt.next_turn, self.parser)


def split_delta(delta: Delta, parser: OutputParser) -> Delta:
    """Return the next delta of a choice with its thought in `reasoning`."""
    pieces = parser.feed(delta.text)
    if delta.finish_reason is not None:
        pieces += parser.finish(cut=delta.finish_reason != "stop")
    texts = {"content": "", "reasoning": ""}
    for piece in pieces:
        texts[piece.kind] += piece.text
    return replace(delta, text=texts["content"], reasoning=texts["reasoning"])


class Collector:
    """Collects the deltas of one request into an Output.

    Args:
        ended: called on the engine's thread when the request ends. It is called once: a wake-up of
            the waiting thread at each step would take time from steps.
    """

    def __init__(
        self, prompt: Prompt, params: SamplingParams, form: TextForm, ended: Callable[[], object]
    ) -> None:
        self._prompt = prompt
        self._params = params
        self._form = form
        self._ended = ended
        self._parts: list[list[Delta]] = [[] for _ in range(params.n)]
        self._unfinished = params.n
        self._last: Delta | None = None

    def push(self, delta: Delta) -> None:
        """Take a delta on the engine's thread."""
        self._parts[delta.index].append(delta)
        self._unfinished -= delta.finish_reason is not None
        if self._last is None and (delta.error is not None or not self._unfinished):
            self._last = delta
            self._ended()

    def result(self) -> Output | VlmServeError:
        """Return the answer of a request that has ended, or its error."""
        last = self._last
        assert last is not None
        if last.error is not None:
            return last.error
        choices = [self._choice(deltas) for deltas in self._parts]
        first = choices[0]
        assert last.cache_report is not None
        return Output(
            text=first.text,
            token_ids=first.token_ids,
            prompt_token_ids=list(self._prompt.token_ids),
            finish_reason=first.finish_reason,
            usage=last.usage,
            cache_report=last.cache_report,
            logprobs=first.logprobs,
            stop_reason=first.stop_reason,
            choices=choices,
            routed_experts=first.routed_experts,
            routed_experts_gaps=first.routed_experts_gaps,
            prompt_logprobs=self._parts[0][0].prompt_logprobs,
            vector=last.vector,
            reasoning=first.reasoning,
            tool_calls=first.tool_calls,
        )

    def _choice(self, deltas: list[Delta]) -> Choice:
        last, parser = deltas[-1], self._form.parser()
        assert last.finish_reason is not None
        pieces = parser.feed("".join(delta.text for delta in deltas))
        message = message_of(pieces + parser.finish(cut=last.finish_reason != "stop"))
        wants_logprobs = self._params.logprobs is not None
        return Choice(
            text=message["content"] or "",
            token_ids=[token for delta in deltas for token in delta.token_ids],
            finish_reason=last.finish_reason,
            logprobs=[d for delta in deltas for d in delta.logprobs] if wants_logprobs else None,
            stop_reason=last.stop_reason,
            routed_experts=last.routed_experts,
            routed_experts_gaps=last.routed_experts_gaps,
            reasoning=message.get("reasoning_content"),
            tool_calls=message.get("tool_calls", []),
        )
