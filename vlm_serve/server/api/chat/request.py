"""The request body of POST /v1/chat/completions, and parsing it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.preprocess.messages import Conversation, read_messages
from vlm_serve.sampling_params import MAX_LOGPROBS
from vlm_serve.server.api.conversation import ChatInput, ParsedRequest, with_thinking, with_variable
from vlm_serve.server.api.field_checks import allowed_tools
from vlm_serve.server.api.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    GenerationRequest,
    Items,
    RequestModel,
    Table,
    Verbosity,
)
from vlm_serve.server.api.structured import ToolChoice


class ChatMessage(RequestModel):
    role: str = Field(max_length=64)
    content: str | Items[Table[Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Items[Table[Any]] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(RequestModel):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: Table[Any] | None = None


class Tool(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class TemplateFields(RequestModel):
    """The fields that shape a chat prompt, besides its messages."""

    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Table[Any] | None = None
    media_io_kwargs: Table[Any] | None = None
    mm_processor_kwargs: Table[Any] | None = None

    def chat_input(self, messages: list[ChatMessage]) -> ChatInput:
        """Return the input of the chat prompt.

        Raises:
            InvalidRequestError: two options exclude each other.
        """

        def read() -> Conversation:
            return read_messages([message.model_dump(exclude_unset=True) for message in messages])

        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        add_prompt = self.add_generation_prompt
        return ChatInput(
            read=read,
            tools=[
                {"type": "function"} | tool.model_dump(exclude_unset=True)
                for tool in self.tools or []
            ],
            add_generation_prompt=not continues if add_prompt is None else add_prompt,
            continue_final_message=continues,
            template_kwargs=self.chat_template_kwargs,
            media_io_kwargs=self.media_io_kwargs,
            mm_processor_kwargs=self.mm_processor_kwargs,
        )


class PredictionPart(RequestModel):
    type: Literal["text"] = "text"
    text: str


class Prediction(RequestModel):
    """The text that the client expects in the answer."""

    type: Literal["content"] = "content"
    content: str | Items[PredictionPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletionRequest(TemplateFields, GenerationRequest):
    messages: Items[ChatMessage] = Field(max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | Table[Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: Verbosity | None = None
    prediction: Prediction | None = None

    def parsed(self) -> ParsedRequest:
        """Parse the request.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        given = self.chat_input(self.messages)
        limit = self.max_completion_tokens
        params = self.all_sampling(
            self.max_tokens if limit is None else limit, self._top_logprobs()
        )
        if self.prediction is not None:
            params = replace(params, prediction=self.prediction.text)
        return ParsedRequest(
            input=with_variable(
                with_thinking(given, self.reasoning_effort), "verbosity", self.verbosity
            ),
            params=params,
            choice=self._tool_choice(given.function_names),
            form_field=self.form_field,
            names={"logprobs": "top_logprobs"},
        )

    def _top_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None: no logprobs."""
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be at least 0 and at most {MAX_LOGPROBS}, got {top}",
                param="top_logprobs",
            )
        if top and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return (top or 0) if self.logprobs else None

    def _tool_choice(self, names: list[str]) -> ToolChoice:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return ToolChoice.of(choice, names, self.parallel_tool_calls)
        if choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools")
            if not isinstance(allowed, dict):
                raise FieldError("tool_choice.allowed_tools", "must be an object")
            tools = allowed_tools(allowed, "tool_choice.allowed_tools.tools")
            only = [each["function"].get("name") for each in tools if _has_function(each)]
            if len(only) < len(tools):
                raise FieldError("tool_choice.allowed_tools.tools", "must be functions")
            return ToolChoice.allowed(allowed.get("mode"), only, names, self.parallel_tool_calls)
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise InvalidRequestError(
                'a tool_choice object must be {"type": "function", "function": {"name": ...}}, or '
                'have the type "allowed_tools"',
                param="tool_choice",
            )
        return ToolChoice.function(name, names)


def _has_function(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "function" and isinstance(tool.get("function"), dict)
