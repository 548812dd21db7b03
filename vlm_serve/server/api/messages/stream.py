"""The response to a message request, complete and as a stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import from_json

from vlm_serve.errors import VlmServeError
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import Event
from vlm_serve.server.api.bodies import CacheReportBody, Optional
from vlm_serve.server.api.conversation import ConversationTask
from vlm_serve.server.api.messages.request import MessagesRequest
from vlm_serve.server.api.output_blocks import BlockStream, OutputBlock
from vlm_serve.server.api.reports import cache_report_body
from vlm_serve.server.http.errors import messages_envelope


class MessageBody(BaseModel):
    """The response body of /v1/messages."""

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

    def __init__(
        self, body: MessagesRequest, chat: ConversationTask, generation: Generation
    ) -> None:
        super().__init__(chat.parser(generation), chat.task.attempt)
        self._request = body
        self._chat = chat
        self._generation = generation

    def start(self) -> list[Event]:
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
        delta = {"type": kind, name: text}
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]

    def closed(self, block: OutputBlock) -> list[Event]:
        return [{"type": "content_block_stop", "index": block.index}]

    def end(self) -> list[Event]:
        body = self.result()
        delta = {"stop_reason": body.stop_reason, "stop_sequence": body.stop_sequence}
        last: Event = {"type": "message_delta", "delta": delta, "usage": body.usage}
        if body.cache_report is not None:
            last["cache_report"] = body.cache_report.model_dump()
        return [last, {"type": "message_stop"}]

    def failed(self, error: VlmServeError) -> list[Event]:
        return [messages_envelope(error, self._chat.task.request_id)]

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

    def _body(self, content: list[dict[str, Any]]) -> MessageBody:
        usage = self._generation.usage
        return MessageBody(
            id=f"msg_{self._chat.task.request_id}",
            model=self._chat.model,
            content=content,
            stop_reason=None,
            stop_sequence=None,
            usage={
                # In this API `input_tokens` excludes tokens read from the cache.
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,
                "cache_read_input_tokens": usage.cached_tokens,
                "cache_creation_input_tokens": 0,
                "output_tokens": usage.completion_tokens,
            },
        )


def _content(block: OutputBlock) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    # The token limit may have cut the call. Keep its complete part, as clients do with a stream.
    arguments = from_json(block.text or "{}", allow_partial=True)
    return {
        "type": "tool_use",
        "id": f"toolu_{block.token}",
        "name": block.name,
        "input": arguments,
    }
