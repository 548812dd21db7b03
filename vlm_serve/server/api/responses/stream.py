"""The response to a response request, complete and as a stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from vlm_serve.engine.outputs import Delta
from vlm_serve.errors import VlmServeError
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import Event
from vlm_serve.server.api.bodies import CacheReportBody, Optional, TokenLogprob
from vlm_serve.server.api.conversation import ConversationTask
from vlm_serve.server.api.logprobs import chat_logprobs
from vlm_serve.server.api.output_blocks import BlockStream, OutputBlock
from vlm_serve.server.api.reports import cache_report_body, usage_body
from vlm_serve.server.api.responses.custom_input import CustomInput
from vlm_serve.server.api.responses.new_turn import NewTurn
from vlm_serve.server.api.responses.output_items import item_id, item_of, part_of
from vlm_serve.server.api.responses.request import ResponsesRequest

Status = Literal["in_progress", "completed", "incomplete", "failed"]


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
    cache_report: Optional[CacheReportBody] = None


class ResponseStream(BlockStream):
    """The events of one response."""

    def __init__(
        self,
        body: ResponsesRequest,
        chat: ConversationTask,
        tokenizer: Tokenizer,
        generation: Generation,
        turn: NewTurn,
    ) -> None:
        super().__init__(chat.parser(generation), chat.task.attempt)
        self._custom_tools = body.custom_tools
        self._chat = chat
        self._tokenizer = tokenizer
        self._request = body
        self._turn = turn
        self._generation = generation
        self._number = 0
        self._input = CustomInput()
        self._items: list[dict[str, Any]] = []

    def start(self) -> list[Event]:
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
            return [self._text_event("delta", block, [], delta=text)] if text else []
        return [self._text_event("delta", block, logprobs, delta=text)]

    def logprobs_of(self, delta: Delta) -> list[dict[str, Any]]:
        top = self._chat.task.params.logprobs
        if top is None:
            return []
        entries = chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, top)
        return [_logprob(entry) for entry in entries]

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
        return [self._event(f"response.{body.status}", response=body.model_dump())]

    def failed(self, error: VlmServeError) -> list[Event]:
        body = self._body("failed")
        body.error = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=body.model_dump())]

    def result(self) -> ResponseBody:
        generation = self._generation
        cut = self.finish_reason == "length"
        body = self._body("incomplete" if cut else "completed")
        body.incomplete_details = {"reason": "max_output_tokens"} if cut else None
        counts = usage_body(generation.usage, generation.prompt)
        cached = counts.prompt_tokens_details.model_dump()
        body.usage = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": cached | {"cache_write_tokens": 0},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": counts.total_tokens,
        }
        if self._request.cache_report:
            body.cache_report = cache_report_body(generation.cache_report)
        self._turn.store(body.model_dump())
        return body

    def _body(self, status: Status) -> ResponseBody:
        request, params = self._request, self._chat.task.params
        return ResponseBody(
            id=self._turn.response_id or f"resp_{self._chat.task.request_id}",
            created_at=self._chat.created,
            status=status,
            instructions=request.instructions,
            max_output_tokens=params.max_tokens,
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
        )

    def _is_custom(self, block: OutputBlock) -> bool:
        return block.kind == "call" and block.name in self._custom_tools

    def _item(self, block: OutputBlock, status: str) -> dict[str, Any]:
        return item_of(block, status, custom=self._is_custom(block))

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _item_event(self, name: str, block: OutputBlock, item: dict[str, Any]) -> Event:
        return self._event(f"response.output_item.{name}", output_index=block.index, item=item)

    def _part_event(self, name: str, block: OutputBlock) -> Event:
        place = {
            "item_id": item_id(block, custom=self._is_custom(block)),
            "output_index": block.index,
            "content_index": 0,
        }
        return self._event(f"response.content_part.{name}", **place, part=part_of(block))

    def _text_event(
        self, step: str, block: OutputBlock, logprobs: list[dict[str, Any]], **fields: Any
    ) -> Event:
        place: dict[str, Any] = {
            "item_id": item_id(block, custom=self._is_custom(block)),
            "output_index": block.index,
        }
        if block.kind != "call":
            place["content_index"] = 0
        if block.kind == "text":
            place["logprobs"] = logprobs
        kind = {"text": "output_text", "reasoning": "reasoning_text"}.get(block.kind)
        if kind is None:
            custom = self._is_custom(block)
            kind = "custom_tool_call_input" if custom else "function_call_arguments"
        return self._event(f"response.{kind}.{step}", **place, **fields)


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    """Return a logprobs entry in this API's format: without text, `bytes` is empty instead of
    null."""
    made = entry.model_dump()
    for each in (made, *made["top_logprobs"]):
        each["bytes"] = each["bytes"] or []
    return made
