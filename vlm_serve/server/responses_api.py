"""POST /v1/responses: OpenAI's newer form of a chat request. Nothing is stored between requests."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.errors import VlmServeError
from vlm_serve.server.blocks import Block, BlockStream, Event
from vlm_serve.server.body import read_json
from vlm_serve.server.chat import ChatTask, chat_task, output_parser
from vlm_serve.server.errors import public_error
from vlm_serve.server.fields import ignored_fields, ignored_header
from vlm_serve.server.generation import Generation, answering
from vlm_serve.server.output_parser import OutputParser
from vlm_serve.server.reports import cache_report_body, usage_body
from vlm_serve.server.responses import CacheReportBody, Optional
from vlm_serve.server.responses_input import (
    RESPONSES_UNIMPLEMENTED,
    ResponsesRequest,
    own_names,
)
from vlm_serve.server.service import Service
from vlm_serve.server.streaming import Chunks, stream_response, until_disconnected

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseBody(BaseModel):
    """The answer of /v1/responses, also in the events of its stream."""

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
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: dict[str, Any] | None = None
    cache_report: Optional[CacheReportBody] = None


class ResponseStream(BlockStream):
    """The events of one response."""

    def __init__(self, body: ResponsesRequest, chat: ChatTask, parser: OutputParser) -> None:
        super().__init__(parser)
        self._chat = chat
        self._asked = body
        self._number = 0
        self._items: list[dict[str, Any]] = []

    def start(self) -> list[Event]:
        return [
            self._event(f"response.{name}", response=self.body("in_progress").model_dump())
            for name in ("created", "in_progress")
        ]

    def opened(self, block: Block) -> list[Event]:
        events = [self._item_event("added", block, _item(block, "in_progress"))]
        if block.kind != "call":
            events.append(self._part_event("added", block))
        return events

    def grown(self, block: Block, text: str) -> list[Event]:
        return [self._text_event("delta", block, delta=text)]

    def closed(self, block: Block) -> list[Event]:
        item = _item(block, "incomplete" if self.finish_reason == "length" else "completed")
        self._items.append(item)
        if block.kind == "call":
            done = {"arguments": block.text, "name": block.name}
            return [
                self._text_event("done", block, **done),
                self._item_event("done", block, item),
            ]
        return [
            self._text_event("done", block, text=block.text),
            self._part_event("done", block),
            self._item_event("done", block, item),
        ]

    def end(self, generation: Generation) -> Event:
        body = self.whole(generation)
        return self._event(f"response.{body.status}", response=body.model_dump())

    def failed(self, error: VlmServeError) -> list[Event]:
        body = self.body("failed")
        body.error = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=body.model_dump())]

    def whole(self, generation: Generation) -> ResponseBody:
        """The response after its last delta."""
        cut = self.finish_reason == "length"
        body = self.body("incomplete" if cut else "completed")
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
        if self._asked.cache_report:
            body.cache_report = cache_report_body(generation.cache_report)
        return body

    def body(self, status: Status) -> ResponseBody:
        asked = self._asked
        return ResponseBody(
            id=f"resp_{self._chat.task.request_id}",
            created_at=self._chat.created,
            status=status,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            model=self._chat.model,
            output=list(self._items),
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            temperature=asked.temperature,
            text={"format": (asked.text or {}).get("format") or {"type": "text"}},
            tool_choice=asked.tool_choice or "auto",
            tools=[
                {"parameters": None, "strict": None} | tool.model_dump(exclude_unset=True)
                for tool in asked.tools or []
            ],
            top_p=asked.top_p,
        )

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _item_event(self, name: str, block: Block, item: dict[str, Any]) -> Event:
        return self._event(f"response.output_item.{name}", output_index=block.index, item=item)

    def _part_event(self, name: str, block: Block) -> Event:
        place = {"item_id": _item_id(block), "output_index": block.index, "content_index": 0}
        return self._event(f"response.content_part.{name}", **place, part=_part(block))

    def _text_event(self, step: str, block: Block, **fields: Any) -> Event:
        place: dict[str, Any] = {"item_id": _item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        if block.kind == "text":
            place["logprobs"] = []
        kind = {"text": "output_text", "reasoning": "reasoning_text"}.get(block.kind)
        kind = kind or "function_call_arguments"
        return self._event(f"response.{kind}.{step}", **place, **fields)


def _item_id(block: Block) -> str:
    return {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind] + block.token


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _item(block: Block, status: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": _item_id(block), "status": status}
    if block.kind == "call":
        call = {"call_id": f"call_{block.token}", "name": block.name, "arguments": block.text}
        return item | {"type": "function_call"} | call
    parts = [] if status == "in_progress" else [_part(block)]
    if block.kind == "reasoning":
        return item | {"type": "reasoning", "summary": [], "content": parts}
    return item | {"type": "message", "role": "assistant", "content": parts}


async def create_response(service: Service, request: Request) -> Response:
    """Answers one request, whole or as a stream. Raises as `chat_completions` does."""
    arrival = time.monotonic()
    body = await read_json(request, ResponsesRequest, service.config.max_body_bytes)
    ignored = ignored_fields(body.model_extra or {}, RESPONSES_UNIMPLEMENTED)
    headers = ignored_header(ignored)
    with own_names():
        translated = body.as_chat()
        ignored_fields(translated.model_extra or {})  # refuses what chat does not implement either
        chat = chat_task(service, request, translated, arrival)
        if body.stream:
            events = _events(service, body, chat)
            return await stream_response(request, events, headers, chat.task.request_id, named=True)
        answer = await until_disconnected(request, _whole(service, body, chat))
    return JSONResponse(answer.model_dump(), headers=headers)


async def _whole(service: Service, body: ResponsesRequest, chat: ChatTask) -> ResponseBody:
    async with answering(service, chat.task) as generation:
        stream = ResponseStream(body, chat, output_parser(service, chat, generation))
        async for delta in generation.deltas():
            stream.push(delta)
    return stream.whole(generation)


async def _events(service: Service, body: ResponsesRequest, chat: ChatTask) -> Chunks:
    async with answering(service, chat.task) as generation:
        stream = ResponseStream(body, chat, output_parser(service, chat, generation))
        started = False
        try:
            async for delta in generation.deltas():
                if not started:
                    started = True
                    for event in stream.start():
                        yield event
                for event in stream.push(delta):
                    yield event
        except Exception as error:
            if not started:
                raise  # it still has a status of its own
            for event in stream.failed(public_error(error, chat.task.request_id)):
                yield event
            return
        yield stream.end(generation)
