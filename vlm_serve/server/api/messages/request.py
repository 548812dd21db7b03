"""The request body of POST /v1/messages, and parsing it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from vlm_serve.errors import FieldError
from vlm_serve.server.api.conversation import ChatInput, ParsedRequest, with_thinking, with_variable
from vlm_serve.server.api.field_checks import text_of, unsupported
from vlm_serve.server.api.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AnswerRequest,
    Items,
    RequestModel,
    Table,
)
from vlm_serve.server.api.messages.input_blocks import InputMessage, read_blocks
from vlm_serve.server.api.structured import ToolChoice, json_schema_form
from vlm_serve.server.api.unknown_fields import CHAT_ONLY, UNIMPLEMENTED
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.structured_outputs import StructuredOutputs

MESSAGES_REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({},),
    "mcp_servers": ([],),
    "output_format": (),
}

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NAMES = {"stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens"}


class MessageParam(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Table[Any]] | None


class MessagesTool(RequestModel):
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: Table[Any] | None = None


class OutputConfig(RequestModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Table[Any] | None = None


class MessagesPrompt(AnswerRequest):
    """Fields of the prompt; the body of POST /v1/messages/count_tokens."""

    messages: Items[MessageParam] = Field(max_length=MAX_MESSAGES)
    system: str | Items[Table[Any]] | None = None
    tools: Items[MessagesTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Table[Any] | None = None
    thinking: Table[Any] | None = None
    chat_template_kwargs: Table[Any] | None = None
    output_config: OutputConfig | None = None

    def parsed(self) -> ParsedRequest:
        """Parse the request.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        return self._parsed()

    @property
    def effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort

    def _parsed(self, **limits: Any) -> ParsedRequest:
        continues = bool(self.messages) and self.messages[-1].role == "assistant"
        messages = [InputMessage(message.role, message.content or "") for message in self.messages]
        given = ChatInput(
            read=lambda: read_blocks(self.system, messages),
            tools=[_function(tool) for tool in self.tools or []],
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_kwargs=self.chat_template_kwargs,
        )
        with renamed_params(_NAMES):
            budget = (self.thinking or {}).get("budget_tokens")
            params = self.sampling(
                structured_outputs=self._form(), thinking_token_budget=budget, **limits
            )
        thinks = None
        if self.thinking is not None:
            thinks = "none" if self.thinking.get("type") == "disabled" else "medium"
        return ParsedRequest(
            input=with_variable(with_thinking(given, thinks), "reasoning_effort", self.effort),
            params=params,
            choice=self._tool_choice(given.function_names),
            form_field="output_config",
            names=_NAMES,
        )

    def _form(self) -> StructuredOutputs | None:
        form = self.output_config.format if self.output_config is not None else None
        if form is None:
            return None
        if form.get("type") != "json_schema":
            raise FieldError("output_config.format.type", "must be json_schema")
        return json_schema_form(form, "output_config.format")

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


class MessagesRequest(MessagesPrompt):
    max_tokens: int
    stop_sequences: Items[str] | None = None

    def parsed(self) -> ParsedRequest:
        return self._parsed(max_tokens=self.max_tokens, stop=tuple(self.stop_sequences or ()))


# Counting ignores the fields that only the answer needs, so the same body serves both endpoints.
MESSAGES_UNIMPLEMENTED = {
    name: neutral
    for name, neutral in (UNIMPLEMENTED | CHAT_ONLY | MESSAGES_REFUSED).items()
    if name not in MessagesRequest.model_fields
}


def _function(tool: MessagesTool) -> dict[str, Any]:
    # Keep the field order of the chat API: templates print it, and equal tools should give equal
    # prompts.
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {}
    return {"type": "function", "function": function}
