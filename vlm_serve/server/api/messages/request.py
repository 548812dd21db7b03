"""The request body of POST /v1/messages, and parsing it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from vlm_serve.errors import FieldError
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.values import text_of, unsupported
from vlm_serve.preprocess.template_traits import TemplateTraits
from vlm_serve.server.api.conversation import ParsedRequest, set_variables
from vlm_serve.server.api.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AnswerRequest,
    Items,
    RequestModel,
    Table,
    Whole,
)
from vlm_serve.server.api.sampling import sampling_names, sampling_of, with_sampling
from vlm_serve.server.api.structured import ToolChoice, json_schema_form
from vlm_serve.server.api.unknown_fields import unimplemented_in
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.structured_outputs import StructuredOutputs

MESSAGES_REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "output_format": (),
}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
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
    model_config = ConfigDict(extra="forbid", strict=True)

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
    output_config: OutputConfig | None = None

    @property
    def effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort

    def parsed(self, conversation: Conversation, traits: TemplateTraits) -> ParsedRequest:
        """Parse the request.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        thinking = None
        if self.thinking is not None:
            thinking = self.thinking.get("type") != "disabled"
        conversation.default_kwargs(enable_thinking=thinking)
        conversation = set_variables(
            conversation,
            traits,
            effort=self.effort,
            effort_name="output_config.effort",
            switched=False,
        )
        with renamed_params(_NAMES):
            budget = (self.thinking or {}).get("budget_tokens")
            params = sampling_of(
                "messages", self, structured_outputs=self._form(), thinking_token_budget=budget
            )
        choice = self._tool_choice(list(conversation.functions))
        return ParsedRequest(conversation, params, choice, "output_config", _NAMES, clamped=True)

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


@with_sampling("messages")
class MessagesRequest(MessagesPrompt):
    max_tokens: Whole


# Counting ignores the fields that only the answer needs, so the same body serves both endpoints.
MESSAGES_UNIMPLEMENTED = {
    name: neutral
    for name, neutral in (unimplemented_in("messages") | MESSAGES_REFUSED).items()
    if name not in MessagesRequest.model_fields
}
