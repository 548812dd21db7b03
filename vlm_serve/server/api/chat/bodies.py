"""Response bodies in OpenAI's format; docs/http-api.md lists the additions."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from vlm_serve.server.api.bodies import (
    CacheReportBody,
    ChatLogprobs,
    Optional,
    PromptLogprobsBody,
    UsageBody,
)


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning: Optional[str] = None
    reasoning_content: Optional[str] = None
    tool_calls: Optional[list[ToolCall]] = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: Optional[int | str] = None
    token_ids: Optional[list[int]] = None
    routed_experts: Optional[str] = None
    routed_experts_gaps: Optional[list[tuple[int, int]]] = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    cache_report: Optional[CacheReportBody] = None
    prompt_token_ids: Optional[list[int]] = None
    prompt_logprobs: Optional[PromptLogprobsBody] = None
