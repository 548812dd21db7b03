"""POST /v1/messages: a chat request in Anthropic's form."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.server.blocks import Block, BlockStream, Event
from vlm_serve.server.body import read_json
from vlm_serve.server.chat import ChatTask, chat_task, output_parser
from vlm_serve.server.errors import messages_envelope, public_error
from vlm_serve.server.fields import ignored_fields, ignored_header
from vlm_serve.server.generation import Generation, answering
from vlm_serve.server.messages_input import MESSAGES_UNIMPLEMENTED, MessagesRequest
from vlm_serve.server.output_parser import OutputParser
from vlm_serve.server.reports import cache_report_body
from vlm_serve.server.responses import CacheReportBody, Optional
from vlm_serve.server.service import Service
from vlm_serve.server.streaming import Chunks, stream_response, until_disconnected


class MessageBody(BaseModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, int]
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

    def __init__(self, chat: ChatTask, generation: Generation, parser: OutputParser) -> None:
        super().__init__(parser)
        self._chat = chat
        self._generation = generation

    def start(self) -> Event:
        body = self._body([])
        body.usage["output_tokens"] = 0
        return {"type": "message_start", "message": body.model_dump()}

    def opened(self, block: Block) -> list[Event]:
        empty = Block(block.kind, block.index, block.token, block.name)
        start = {"type": "content_block_start", "index": block.index}
        return [start | {"content_block": _content(empty)}]

    def grown(self, block: Block, text: str) -> list[Event]:
        kind, name = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        delta = {"type": kind, name: text}
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]

    def closed(self, block: Block) -> list[Event]:
        return [{"type": "content_block_stop", "index": block.index}]

    def end(self) -> list[Event]:
        body = self.whole()
        delta = {"stop_reason": body.stop_reason, "stop_sequence": body.stop_sequence}
        last: Event = {"type": "message_delta", "delta": delta, "usage": body.usage}
        if body.cache_report is not None:
            last["cache_report"] = body.cache_report.model_dump()
        return [last, {"type": "message_stop"}]

    def whole(self) -> MessageBody:
        """The message after its last delta."""
        body = self._body([_content(block) for block in self.blocks])
        if self.finish_reason == "length":
            body.stop_reason = "max_tokens"
        elif isinstance(self.stop_reason, str):
            body.stop_reason, body.stop_sequence = "stop_sequence", self.stop_reason
        elif any(block.kind == "call" for block in self.blocks):
            body.stop_reason = "tool_use"
        else:
            body.stop_reason = "end_turn"
        if self._chat.body.cache_report:
            body.cache_report = cache_report_body(self._generation.cache_report)
        return body

    def _body(self, content: list[dict[str, Any]]) -> MessageBody:
        usage = self._generation.usage
        return MessageBody(
            id=f"msg_{self._chat.task.request_id}",
            model=self._chat.model,
            content=content,
            stop_reason=None,
            stop_sequence=None,
            usage={
                # In this API the tokens that were read from the cache are counted apart.
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,
                "cache_read_input_tokens": usage.cached_tokens,
                "cache_creation_input_tokens": 0,
                "output_tokens": usage.completion_tokens,
            },
        )


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments = json.loads(block.text or "{}")
    return {
        "type": "tool_use",
        "id": f"toolu_{block.token}",
        "name": block.name,
        "input": arguments,
    }


async def create_message(service: Service, request: Request) -> Response:
    """Answers one conversation, whole or as a stream. Raises as `chat_completions` does."""
    arrival = time.monotonic()
    body = await read_json(request, MessagesRequest, service.config.max_body_bytes)
    headers = ignored_header(ignored_fields(body.model_extra or {}, MESSAGES_UNIMPLEMENTED))
    chat = chat_task(service, request, body.as_chat(), arrival)
    if body.stream:
        events = _events(service, chat)
        return await stream_response(request, events, headers, chat.task.request_id, named=True)
    answer = await until_disconnected(request, _whole(service, chat))
    return JSONResponse(answer.model_dump(), headers=headers)


async def _whole(service: Service, chat: ChatTask) -> MessageBody:
    async with answering(service, chat.task) as generation:
        stream = MessageStream(chat, generation, output_parser(service, chat, generation))
        async for delta in generation.deltas():
            stream.push(delta)
    return stream.whole()


async def _events(service: Service, chat: ChatTask) -> Chunks:
    async with answering(service, chat.task) as generation:
        stream = MessageStream(chat, generation, output_parser(service, chat, generation))
        started = False
        try:
            async for delta in generation.deltas():
                if not started:
                    started = True
                    yield stream.start()
                for event in stream.push(delta):
                    yield event
        except Exception as error:
            if not started:
                raise  # it still has a status of its own
            name = chat.task.request_id
            yield messages_envelope(public_error(error, name), name)
            return
        for event in stream.end():
            yield event
