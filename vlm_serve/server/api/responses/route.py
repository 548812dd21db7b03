"""The routes of POST /v1/responses and /v1/responses/input_tokens, and the response.

The response is complete or a stream of events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.errors import VlmServeError
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.items import read_past
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.responses.new_turn import (
    NewTurn,
    bytes_of_past,
    items_until,
    new_turn,
    parent_of,
    with_references,
)
from vlm_serve.server.api.responses.request import RESPONSES_UNIMPLEMENTED, ResponsesRequest
from vlm_serve.server.api.shared.answer import Incoming, ResponseSpec, answer_prompt
from vlm_serve.server.api.shared.comparison import Comparison
from vlm_serve.server.api.shared.conversation import (
    ConversationTask,
    ParsedRequest,
    conversation_task,
    count_tokens,
)
from vlm_serve.server.api.shared.fields import (
    CacheReportBody,
    Optional,
    cache_report_body,
    usage_body,
)
from vlm_serve.server.api.shared.logprobs import chat_logprobs
from vlm_serve.server.api.shared.output_blocks import (
    BlockStream,
    CustomInput,
    OutputBlock,
    input_of,
)
from vlm_serve.server.api.shared.request_body import read_prompt
from vlm_serve.server.api.shared.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.http.auth import owner_of
from vlm_serve.server.http.frames import GAP
from vlm_serve.server.http.streaming import Event, to_json
from vlm_serve.server.http.tenants import tenant_of
from vlm_serve.server.service import Service

Status = Literal["in_progress", "completed", "incomplete", "failed"]
_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


class InputTokens(BaseModel):
    """The response body of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


async def count_input_tokens(service: Service, request: Request) -> Response:
    """Count the prompt tokens of a response request.

    Raises:
        VlmServeError: the request is invalid, or the server does not admit it.
    """

    def parse(
        body: ResponsesRequest, conversation: Conversation
    ) -> tuple[Mapping[str, str], ParsedRequest, str]:
        ignored = ignored_fields(body.model_extra or {}, RESPONSES_UNIMPLEMENTED)
        service.state.resolve_model(body.model)
        owner = owner_of(request.scope, body.cache_salt)
        parent = parent_of(service, owner, body.previous_response_id)
        read_past(items_until(parent), conversation)
        parsed = body.parsed(conversation, service.engine.preprocessor.template_traits)
        return ignored_header(ignored, parsed.conversation.ignored), parsed, owner.salt

    headers, parsed, salt = await read_prompt(
        service, request, "responses", ResponsesRequest, parse, *_past(service, request)
    )
    answer = InputTokens(
        input_tokens=await count_tokens(service, parsed, salt, tenant_of(request.scope))
    )
    return JSONResponse(answer.model_dump(), headers=headers)


async def create_response(service: Service, request: Request) -> Response:
    """Answer a conversation. It raises as `respond` does."""
    past = _past(service, request)
    return await answer_prompt(service, request, "responses", ResponsesRequest, _spec, *past)


def _past(service: Service, request: Request) -> tuple[partial[Any], partial[int]]:
    """Return what `read_prompt` adds of stored responses to a body, and how it counts them."""
    return (
        partial(with_references, service, request.scope),
        partial(bytes_of_past, service, request.scope),
    )


def _spec(incoming: Incoming, body: ResponsesRequest, conversation: Conversation) -> ResponseSpec:
    service = incoming.service
    ignored = ["store"] if body.store and service.state.responses is None else []
    ignored += ignored_fields(body.model_extra or {}, RESPONSES_UNIMPLEMENTED)
    turn = new_turn(service, incoming.scope, body)
    read_past(turn.past, conversation)
    parsed = body.parsed(conversation, service.engine.preprocessor.template_traits)
    chat = conversation_task(incoming, body, parsed)
    settings = {"reasoning_effort": body.effort, "verbosity": body.verbosity}
    comparison = Comparison(incoming, body, parsed.conversation, body.compared, **settings)
    stream_of = partial(ResponseStream, body, chat, service.tokenizer, turn, comparison)
    header = ignored_header(ignored, parsed.conversation.ignored)
    return ResponseSpec([chat.task], stream_of, bool(body.stream), header, named=True)


def _part_of(block: OutputBlock) -> dict[str, Any]:
    """Return the part of a block's item that holds its text."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    part = {"type": "output_text", "text": block.text, "annotations": []}
    return part | {"logprobs": list(block.logprobs)}


class ResponseBody(BaseModel):
    """The response body of /v1/responses, also in the events of its stream."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float | None
    top_logprobs: int = 0
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: dict[str, Any] | None = None
    prompt_cache_diagnostics: Optional[dict[str, Any]] = None
    cache_report: Optional[CacheReportBody] = None


class ResponseStream(BlockStream):
    """The events of one response."""

    def __init__(
        self,
        body: ResponsesRequest,
        chat: ConversationTask,
        tokenizer: Tokenizer,
        turn: NewTurn,
        comparison: Comparison,
        generations: Sequence[Generation],
    ) -> None:
        (generation,) = generations
        parser, attempt = chat.parser(generation), chat.task.attempt
        super().__init__(parser, attempt, only_prompt=body.only_prompt)
        self._custom_tools = body.custom_tools
        self._chat = chat
        self._tokenizer = tokenizer
        self._request = body
        self._turn = turn
        self._comparison = comparison
        self._generation = generation
        self._number = 0
        self._input = CustomInput()
        self._items: list[dict[str, Any]] = []

    def start(self) -> list[Event]:
        self._keep_prompt()  # a client may go on from an answer that it has interrupted
        return [
            self._event(f"response.{name}", response=self._body("in_progress").model_dump())
            for name in ("created", "in_progress")
        ]

    def opened(self, block: OutputBlock) -> list[Event]:
        self._input = CustomInput()
        events = [self._item_event("added", block, self._item(block, "in_progress"))]
        if block.kind != "call":
            events.append(self._part_event("added", block))
        return events

    def grown(self, block: OutputBlock, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        if self._is_custom(block):
            text = self._input.grow(text)
        if not text:
            return []
        number = self._number
        told = [to_json(logprobs)] if block.kind == "text" else []
        values = (str(number), *told, to_json(text))
        frame = self._frames.fill(block.index, partial(self._gapped, block), *values)
        self._number = number + 1
        return [frame]

    def _gapped(self, block: OutputBlock) -> dict[str, Any]:
        return self._text_event("delta", block, GAP, delta=GAP) | {"sequence_number": GAP}

    def logprobs_of(self, delta: Delta) -> list[dict[str, Any]]:
        top = self._chat.task.params.logprobs
        if top is None:
            return []
        entries = chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, top)
        for entry in entries:
            for token in (entry, *entry["top_logprobs"]):
                token["bytes"] = (
                    token["bytes"] or []
                )  # in this API a list, without text an empty one
        return entries

    def closed(self, block: OutputBlock) -> list[Event]:
        cut = self.finish_reason == "length" or self.is_unfinished(block)
        item = self._item(block, "incomplete" if cut else "completed")
        self._items.append(item)
        if self._is_custom(block):
            rest = self._input.rest(item["input"])
            return [
                *([self._text_event("delta", block, [], delta=rest)] if rest else []),
                self._text_event("done", block, [], input=item["input"]),
                self._item_event("done", block, item),
            ]
        if block.kind == "call":
            done = {"arguments": block.text, "name": block.name}
            return [
                self._text_event("done", block, [], **done),
                self._item_event("done", block, item),
            ]
        return [
            self._text_event("done", block, block.logprobs, text=block.text),
            self._part_event("done", block),
            self._item_event("done", block, item),
        ]

    def end(self) -> list[Event]:
        body = self.result()
        self.keep()
        return [self._event(f"response.{body.status}", response=body.model_dump())]

    def failed(self, error: VlmServeError) -> list[Event]:
        body = self._body("failed")
        body.error = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=body.model_dump())]

    def result(self) -> ResponseBody:
        generation = self._generation
        cut = self.finish_reason == "length" and not self._request.only_prompt
        body = self._body("incomplete" if cut else "completed")
        body.incomplete_details = {"reason": "max_output_tokens"} if cut else None
        counts = usage_body(self._request.counted(generation.usage), generation.prompt)
        body.usage = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": counts.prompt_tokens_details.model_dump(),
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": counts.total_tokens,
        }
        if self._request.cache_report:
            body.cache_report = cache_report_body(generation.cache_report)
        self._whole = body.model_dump()
        return body

    def keep(self) -> None:
        self._keep_prompt()
        self._turn.store(self._whole)

    def _keep_prompt(self) -> None:
        self._comparison.keep(self._id, self._generation)

    @property
    def _id(self) -> str:
        return self._turn.response_id or f"resp_{self._chat.task.request_id}"

    def _body(self, status: Status) -> ResponseBody:
        request, params = self._request, self._chat.task.params
        return ResponseBody(
            id=self._id,
            created_at=self._chat.created,
            status=status,
            instructions=request.instructions,
            max_output_tokens=(
                request.max_output_tokens if request.only_prompt else params.max_tokens
            ),
            metadata=request.metadata or {},
            model=self._chat.model,
            output=list(self._items),
            previous_response_id=request.previous_response_id,
            store=self._turn.response_id is not None,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            temperature=params.temperature,
            top_logprobs=request.top_logprobs or 0,
            text={
                "format": (request.text or {}).get("format") or {"type": "text"},
                "verbosity": request.verbosity or "medium",
            },
            tool_choice=request.tool_choice or "auto",
            tools=[
                dict.fromkeys(("parameters", "strict") if tool.type == "function" else ())
                | tool.model_dump(exclude_unset=True)
                for tool in request.tools or []
            ],
            top_p=params.top_p,
            truncation=request.truncation or "disabled",
            prompt_cache_diagnostics=self._comparison.as_openai(self._generation),
        )

    def _is_custom(self, block: OutputBlock) -> bool:
        """Return True if the block calls a tool that takes one text."""
        return block.kind == "call" and block.name in self._custom_tools

    def _item_id(self, block: OutputBlock) -> str:
        return ("ctc_" if self._is_custom(block) else _PREFIXES[block.kind]) + block.token

    def _item(self, block: OutputBlock, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": f"call_{block.token}", "name": block.name}
            if self._is_custom(block):
                return item | {"type": "custom_tool_call"} | call | {"input": input_of(block.text)}
            return item | {"type": "function_call"} | call | {"arguments": block.text}
        parts = [] if status == "in_progress" else [_part_of(block)]
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": parts}
        return item | {"type": "message", "role": "assistant", "content": parts}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _item_event(self, name: str, block: OutputBlock, item: dict[str, Any]) -> Event:
        return self._event(f"response.output_item.{name}", output_index=block.index, item=item)

    def _part_event(self, name: str, block: OutputBlock) -> Event:
        place = {
            "item_id": self._item_id(block),
            "output_index": block.index,
            "content_index": 0,
        }
        return self._event(f"response.content_part.{name}", **place, part=_part_of(block))

    def _text_event(
        self, step: str, block: OutputBlock, logprobs: Any, **fields: Any
    ) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        if block.kind == "text":
            place["logprobs"] = logprobs
        kind = {"text": "output_text", "reasoning": "reasoning_text"}.get(block.kind)
        if kind is None:
            custom = self._is_custom(block)
            kind = "custom_tool_call_input" if custom else "function_call_arguments"
        return self._event(f"response.{kind}.{step}", **place, **fields)
