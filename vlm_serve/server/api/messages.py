"""POST /v1/messages and /v1/messages/count_tokens: chat requests in Anthropic's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from pydantic_core import from_json
from starlette.responses import Response

from vlm_serve.engine.requests.outputs import Usage
from vlm_serve.errors import FieldError
from vlm_serve.preprocess.reading.conversation import AskedMark, Conversation
from vlm_serve.preprocess.reading.values import text_of, unsupported
from vlm_serve.preprocess.text.template import TemplateTraits
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.shared.answer import Incoming, ResponseSpec, answer_prompt
from vlm_serve.server.api.shared.comparison import Comparison
from vlm_serve.server.api.shared.conversation import (
    ConversationTask,
    ParsedRequest,
    conversation_task,
    count_tokens,
    set_variables,
)
from vlm_serve.server.api.shared.fields import (
    MAX_ANSWER_ID,
    MAX_MESSAGES,
    MAX_TOOLS,
    AnswerRequest,
    CacheReportBody,
    Items,
    Optional,
    RequestModel,
    Table,
    Whole,
    cache_report_body,
)
from vlm_serve.server.api.shared.output_blocks import BlockStream, OutputBlock
from vlm_serve.server.api.shared.request_body import read_prompt
from vlm_serve.server.api.shared.sampling import (
    ToolChoice,
    json_schema_form,
    sampling_names,
    sampling_of,
    with_sampling,
)
from vlm_serve.server.api.shared.unknown_fields import (
    ignored_fields,
    ignored_header,
    unimplemented_in,
)
from vlm_serve.server.http.auth import salt_of
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.server.http.frames import GAP
from vlm_serve.server.http.streaming import Event, to_json
from vlm_serve.server.http.tenants import tenant_of
from vlm_serve.server.service import Service
from vlm_serve.structured_outputs import StructuredOutputs

MESSAGES_REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_HOUR = 3600.0
"""Seconds of the longer lifetime of a mark."""
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NAMES = sampling_names("messages") | {"thinking_token_budget": "thinking.budget_tokens"}


class MessageParam(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Table[Any]] | None


class MessagesTool(RequestModel):
    type: str | None = Field(None, max_length=64)
    name: str | None = Field(None, min_length=1, max_length=128)
    description: str | None = None
    input_schema: Table[Any] | None = None


class OutputConfig(RequestModel):
    effort: Effort | None = None
    format: Table[Any] | None = None


class MessagesPrompt(AnswerRequest):
    """Fields of the prompt; the body of POST /v1/messages/count_tokens."""

    messages: Items[MessageParam] = Field(max_length=MAX_MESSAGES)
    system: str | Items[Table[Any]] | None = None
    tools: Items[MessagesTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Table[Any] | None = None
    thinking: Table[Any] | None = None
    chat_template_kwargs: Table[Any] | None = None
    cache_control: Table[Any] | None = None
    context_management: Table[Any] | None = None
    output_config: OutputConfig | None = None
    output_format: Table[Any] | None = None

    def parsed(self, conversation: Conversation, traits: TemplateTraits) -> ParsedRequest:
        """Parse the request.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        output, thinking = self.output_config or OutputConfig(), None
        if self.thinking is not None:
            thinking = self.thinking.get("type") != "disabled"
        kept = self._keeps_thoughts(conversation, traits)
        conversation.default_kwargs(enable_thinking=thinking, preserve_thinking=kept)
        conversation = set_variables(
            conversation,
            traits,
            effort=output.effort,
            effort_name="output_config.effort",
            switched=False,
        )
        conversation.ignored += [f"output_config.{name}" for name in output.model_extra or ()]
        form = _form_of(output.format, "output_config.format")
        form = form or _form_of(self.output_format, "output_format")
        with renamed_params(_NAMES):
            budget = (self.thinking or {}).get("budget_tokens")
            params = sampling_of(
                "messages",
                self,
                structured_outputs=form,
                thinking_token_budget=budget,
            )
        choice = self._tool_choice(list(conversation.functions))
        return ParsedRequest(conversation, params, choice, "output_config", _NAMES, clamped=True)

    def _keeps_thoughts(self, conversation: Conversation, traits: TemplateTraits) -> bool | None:
        """Return True if all thoughts of the history shall stay; None: the template decides.

        Nothing else is done to a context, so it is named.
        """
        if self.context_management is None:
            return None
        edits = self.context_management.get("edits")
        keeps = [
            isinstance(edit, dict)
            and str(edit.get("type")).startswith("clear_thinking_")
            and edit.get("keep") in ("all", {"type": "all"})
            for edit in (edits if isinstance(edits, list) else ())
        ]
        known = "preserve_thinking" in traits.variables and any(keeps)
        if not known or not all(keeps):
            conversation.ignored.append("context_management")
        return known or None

    def _tool_choice(self, names: list[str]) -> ToolChoice:
        choice = self.tool_choice or {}
        kind = choice.get("type")
        parallel = False if choice.get("disable_parallel_tool_use") else None
        if self.tool_choice is None:
            return ToolChoice.of(None, names, parallel)
        if kind == "tool":
            return ToolChoice.function(text_of(choice, "name", "tool_choice"), names)
        if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
            raise unsupported("tool_choice.type", kind)
        return ToolChoice.of(_TOOL_CHOICES[kind], names, parallel)


def _form_of(form: dict[str, Any] | None, place: str) -> StructuredOutputs | None:
    if form is None:
        return None
    if form.get("type") != "json_schema":
        raise FieldError(f"{place}.type", "must be json_schema")
    return json_schema_form(form, place)


class DiagnosticsRequest(RequestModel):
    previous_message_id: str | None = Field(None, max_length=MAX_ANSWER_ID)


@with_sampling("messages")
class MessagesRequest(MessagesPrompt):
    max_tokens: Whole
    diagnostics: DiagnosticsRequest | None = None

    @property
    def only_prompt(self) -> bool:
        """True if the prompt is to be cached for later."""
        return self.max_tokens == 0


# Counting ignores the fields that only the answer needs, so the same body serves both endpoints.
MESSAGES_UNIMPLEMENTED = {
    name: neutral
    for name, neutral in (unimplemented_in("messages") | MESSAGES_REFUSED).items()
    if name not in MessagesRequest.model_fields
}


class MessageBody(BaseModel):
    """The response body of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]
    diagnostics: Annotated[dict[str, Any] | None, Field(exclude_if=lambda told: told == {})] = {}
    cache_report: Optional[CacheReportBody] = None


class MessagesErrorDetails(BaseModel):
    type: str
    message: str


class MessagesErrorBody(BaseModel):
    type: Literal["error"]
    error: MessagesErrorDetails
    request_id: str


class MessageStream(BlockStream):
    """The events of one message."""

    def __init__(
        self,
        body: MessagesRequest,
        marks: Sequence[AskedMark],
        chat: ConversationTask,
        comparison: Comparison | None,
        generations: Sequence[Generation],
    ) -> None:
        (generation,) = generations
        parser, attempt = chat.parser(generation), chat.task.attempt
        super().__init__(parser, attempt, only_prompt=body.only_prompt)
        self._request = body
        self._chat = chat
        self._generation = generation
        self._marks = marks
        self._comparison = comparison

    def start(self) -> list[Event]:
        self.keep()  # a client may go on from an answer that it has interrupted
        body = self._body([])
        body.usage["output_tokens"] = 0
        return [{"type": "message_start", "message": body.model_dump()}]

    def opened(self, block: OutputBlock) -> list[Event]:
        empty = OutputBlock(block.kind, block.index, block.token, block.name)
        start = {"type": "content_block_start", "index": block.index}
        return [start | {"content_block": _content(empty)}]

    def grown(self, block: OutputBlock, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        kind, name = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        delta = {"type": kind, name: GAP}
        grown = {"type": "content_block_delta", "index": block.index, "delta": delta}
        return [self._frames.fill(block.index, lambda: grown, to_json(text))]

    def closed(self, block: OutputBlock) -> list[Event]:
        stop = {"type": "content_block_stop", "index": block.index}
        if block.kind != "reasoning":
            return [stop]
        delta = {"type": "signature_delta", "signature": block.token}
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}, stop]

    def end(self) -> list[Event]:
        body = self.result()
        delta = {"stop_reason": body.stop_reason, "stop_sequence": body.stop_sequence}
        last: dict[str, Any] = {"type": "message_delta", "delta": delta, "usage": body.usage}
        if body.cache_report is not None:
            last["cache_report"] = body.cache_report.model_dump()
        return [last, {"type": "message_stop"}]

    def result(self) -> MessageBody:
        body = self._body([_content(block) for block in self.blocks])
        if self.finish_reason == "length":
            cut = self._generation.clamped
            body.stop_reason = "model_context_window_exceeded" if cut else "max_tokens"
        elif isinstance(self.stop_reason, str):
            body.stop_reason, body.stop_sequence = "stop_sequence", self.stop_reason
        elif self.called:
            body.stop_reason = "tool_use"
        else:
            body.stop_reason = "end_turn"
        if self._request.cache_report:
            body.cache_report = cache_report_body(self._generation.cache_report)
        return body

    def keep(self) -> None:
        if self._comparison is not None:
            self._comparison.keep(self._id, self._generation)

    @property
    def _id(self) -> str:
        return f"msg_{self._chat.task.request_id}"

    def _body(self, content: list[dict[str, Any]]) -> MessageBody:
        usage = self._request.counted(self._generation.usage)
        written, hour = usage.written_tokens, self._written_for_an_hour(usage)
        body = MessageBody(
            id=self._id,
            model=self._chat.model,
            content=content,
            stop_reason=None,
            stop_sequence=None,
            usage={
                # In this API `input_tokens` excludes tokens read from the cache or written to it.
                "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
                "cache_read_input_tokens": usage.cached_tokens,
                "cache_creation_input_tokens": written,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": written - hour,
                    "ephemeral_1h_input_tokens": hour,
                },
                "output_tokens": usage.completion_tokens,
            },
        )
        if self._comparison is not None:
            body.diagnostics = self._comparison.as_anthropic(self._generation)
        return body

    def _written_for_an_hour(self, usage: Usage) -> int:
        """Return the written tokens up to the last mark of an hour; those behind the last mark have
        its lifetime, too."""
        if self._marks and self._marks[-1].ttl == "1h":
            return usage.written_tokens
        ends = [mark.position for mark in self._generation.prompt.marks if mark.seconds == _HOUR]
        return max(0, min(usage.written_tokens, max(ends, default=0) - usage.cached_tokens))


def _content(block: OutputBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        # Clients keep a thought only with a signature. Here any text is one, and none is checked.
        signature = block.token if block.text else ""
        return {"type": "thinking", "thinking": block.text, "signature": signature}
    # The token limit may have cut the call. Keep its complete part, as clients do with a stream.
    arguments = from_json(block.text or "{}", allow_partial=True)
    return {
        "type": "tool_use",
        "id": f"toolu_{block.token}",
        "name": block.name,
        "input": arguments,
    }


class CountedTokens(BaseModel):
    """The response body of /v1/messages/count_tokens."""

    input_tokens: int


async def count_message_tokens(service: Service, request: Request) -> Response:
    """Count the prompt tokens of a message request.

    Raises:
        VlmServeError: the request is invalid, or the server does not admit it.
    """

    def parse(
        body: MessagesPrompt, conversation: Conversation
    ) -> tuple[Mapping[str, str], ParsedRequest, str]:
        service.state.resolve_model(body.model)
        salt = salt_of(request.scope, body.cache_salt)
        return *_parsed(service, body, conversation), salt

    headers, parsed, salt = await read_prompt(service, request, "messages", MessagesPrompt, parse)
    answer = CountedTokens(
        input_tokens=await count_tokens(service, parsed, salt, tenant_of(request.scope))
    )
    return JSONResponse(answer.model_dump(), headers=headers)


def _parsed(
    service: Service, body: MessagesPrompt, conversation: Conversation
) -> tuple[Mapping[str, str], ParsedRequest]:
    """Return the parsed request, after the headers that name what is ignored."""
    ignored = ignored_fields(body.model_extra or {}, MESSAGES_UNIMPLEMENTED)
    parsed = body.parsed(conversation, service.engine.preprocessor.template_traits)
    return ignored_header(ignored, parsed.conversation.ignored), parsed


async def create_message(service: Service, request: Request) -> Response:
    """Answer a conversation. It raises as `respond` does."""
    return await answer_prompt(service, request, "messages", MessagesRequest, _spec)


def _spec(incoming: Incoming, body: MessagesRequest, conversation: Conversation) -> ResponseSpec:
    headers, parsed = _parsed(incoming.service, body, conversation)
    asked = body.diagnostics
    chat, comparison = conversation_task(incoming, body, parsed), None
    if asked is not None:
        parsed.conversation.ignored += [f"diagnostics.{name}" for name in asked.model_extra or ()]
        comparison = Comparison(incoming, body, parsed.conversation, asked.previous_message_id)
    stream_of = partial(MessageStream, body, parsed.conversation.cache.marks, chat, comparison)
    return ResponseSpec([chat.task], stream_of, bool(body.stream), headers, named=True)
