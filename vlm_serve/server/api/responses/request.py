"""The request body of POST /v1/responses, and parsing it."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

from pydantic import Field

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.server.api.conversation import ChatInput, ParsedRequest, with_thinking, with_variable
from vlm_serve.server.api.field_checks import allowed_tools, text_of, unsupported
from vlm_serve.server.api.fields import (
    MAX_TOOLS,
    AnswerRequest,
    Items,
    RequestModel,
    Table,
    Verbosity,
    stop_texts,
)
from vlm_serve.server.api.responses.items import read_input
from vlm_serve.server.api.structured import ToolChoice, json_schema_form, simple_form
from vlm_serve.server.api.unknown_fields import CHAT_ONLY, UNIMPLEMENTED
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.structured_outputs import StructuredOutputs

RESPONSES_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
}
RESPONSES_UNIMPLEMENTED = UNIMPLEMENTED | CHAT_ONLY | RESPONSES_REFUSED

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
_LOGPROBS = "message.output_text.logprobs"
_NOTHING_TO_INCLUDE = ("reasoning.encrypted_content",)


class ResponsesTool(RequestModel):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: Table[Any] | None = None
    strict: bool | None = None


class ResponsesRequest(AnswerRequest):
    input: str | Items[Table[Any]]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = None
    max_output_tokens: int | None = None
    min_p: float | None = None
    stop: str | Items[str] | None = None
    tools: Items[ResponsesTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | Table[Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Table[Any] | None = None
    thinking_token_budget: int | None = None
    text: Table[Any] | None = None
    metadata: Table[str] | None = Field(None, max_length=16)
    include: Items[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: Table[Any] | None = None

    def items(self) -> list[dict[str, Any]]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def parsed(self, past: list[dict[str, Any]]) -> ParsedRequest:
        """Parse the request.

        Args:
            past: the items of the turns before it.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        self._check_numbers()
        given = ChatInput(
            read=lambda: read_input(self.instructions, past, self.input),
            tools=[_function(tool) for tool in self.tools or []],
            template_kwargs=self.chat_template_kwargs,
            answer_tokens=(self.max_output_tokens or 0) if self.truncation == "auto" else None,
        )
        with renamed_params(_NAMES):
            params = self.sampling(
                max_tokens=self.max_output_tokens,
                min_p=self.min_p or 0.0,
                stop=stop_texts(self.stop),
                logprobs=self.logprobs,
                structured_outputs=self._form(),
                thinking_token_budget=self.thinking_token_budget,
            )
        return ParsedRequest(
            input=with_variable(with_thinking(given, self._effort()), "verbosity", self.verbosity),
            params=params,
            choice=self._tool_choice(given.function_names),
            form_field="text",
            names=_NAMES,
        )

    def _check_numbers(self) -> None:
        """Refuse infinite numbers: the response repeats these fields, and JSON has no infinity."""
        for name in ("tools", "tool_choice", "text"):
            value = self.model_dump(include={name}, exclude_unset=True)
            try:
                json.dumps(value, allow_nan=False)
            except ValueError:
                raise FieldError(name, "has a number that is too large") from None

    @property
    def logprobs(self) -> int | None:
        """Alternatives per token of the answer's text; None: no logprobs."""
        for name in self.include or ():
            if name not in (_LOGPROBS, *_NOTHING_TO_INCLUDE):
                raise unsupported("include", name)
        requested = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not requested:
            raise FieldError("top_logprobs", f"needs {_LOGPROBS} in include")
        return (self.top_logprobs or 0) if requested else None

    @property
    def verbosity(self) -> str | None:
        given = (self.text or {}).get("verbosity")
        if given not in (None, *get_args(Verbosity)):
            raise FieldError("text.verbosity", "must be one of " + ", ".join(get_args(Verbosity)))
        return given

    def _effort(self) -> str | None:
        effort = (self.reasoning or {}).get("effort")
        if effort is not None and not isinstance(effort, str):
            raise FieldError("reasoning.effort", "must be text")
        return effort

    def _tool_choice(self, names: list[str]) -> ToolChoice:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return ToolChoice.of(choice, names, self.parallel_tool_calls)
        if choice.get("type") == "allowed_tools":
            tools = allowed_tools(choice, "tool_choice.tools")
            for index, tool in enumerate(tools):
                if tool.get("type") != "function":
                    raise unsupported(f"tool_choice.tools[{index}].type", tool.get("type"))
            only = [tool.get("name") for tool in tools]
            return ToolChoice.allowed(choice.get("mode"), only, names, self.parallel_tool_calls)
        if choice.get("type") != "function":
            raise unsupported("tool_choice.type", choice.get("type"))
        return ToolChoice.function(text_of(choice, "name", "tool_choice"), names)

    def _form(self) -> StructuredOutputs | None:
        """Return the constraint that `text` puts on the answer; None if it puts none."""
        form = (self.text or {}).get("format")
        if form is None:
            return None
        if not isinstance(form, dict):
            raise InvalidRequestError("text.format must be an object", param="text")
        if form.get("type") == "json_schema":
            return json_schema_form(form, "text.format")
        return simple_form(form, "text.format")


def _function(tool: ResponsesTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
