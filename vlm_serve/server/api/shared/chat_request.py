"""The request body of POST /v1/chat/completions, and parsing it; parts that other routes share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.text.template import TemplateTraits
from vlm_serve.sampling_params import MAX_LOGPROBS
from vlm_serve.server.api.shared.conversation import ParsedRequest, set_variables
from vlm_serve.server.api.shared.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    GenerationRequest,
    Items,
    PromptCacheOptions,
    RequestModel,
    Table,
    Verbosity,
    Whole,
    check_stream,
)
from vlm_serve.server.api.shared.sampling import (
    sampling_of,
    structured_outputs_of,
    tool_choice_of,
    with_sampling,
)


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
    type: Literal["function", "custom"] = "function"
    function: FunctionDefinition | None = None
    custom: Table[Any] | None = None


class TemplateFields(RequestModel):
    """The fields that shape a chat prompt, besides its messages."""

    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Table[Any] | None = None
    media_io_kwargs: Table[Any] | None = None
    mm_processor_kwargs: Table[Any] | None = None


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


@with_sampling("chat")
class ChatCompletionRequest(TemplateFields, GenerationRequest):
    messages: Items[ChatMessage] = Field(max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tool_choice: str | Table[Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Items[FunctionDefinition] | None = Field(None, max_length=MAX_TOOLS)
    function_call: str | Table[Any] | None = None
    reasoning_effort: str | None = None
    verbosity: Verbosity | None = None
    prediction: Prediction | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def old_functions(self) -> bool:
        """The functions have the older form, in which an answer has at most one call."""
        return bool(self.functions) and self.tools is None

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the tools that take one text instead of arguments."""
        given = (tool.custom for tool in self.tools or () if tool.type == "custom")
        return frozenset(str(custom.get("name")) for custom in given if custom)

    def parsed(self, conversation: Conversation, traits: TemplateTraits) -> ParsedRequest:
        """Parse the request.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        check_stream(self.stream, self.stream_options, self.prompt_logprobs)
        conversation.ignored += (self.prompt_cache_options or PromptCacheOptions()).ignored
        conversation = set_variables(
            conversation, traits, effort=self.reasoning_effort, verbosity=self.verbosity
        )
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        if self.old_functions:
            choice, parallel = self.function_call, False
        form = structured_outputs_of(self.response_format, self.structured_outputs, self.regex)
        return ParsedRequest(
            conversation,
            sampling_of(
                "chat",
                self,
                logprobs=self._top_logprobs(),
                structured_outputs=form,
                prediction="" if self.prediction is None else self.prediction.text,
            ),
            tool_choice_of(choice, list(conversation.functions), parallel),
            self.form_field,
            {"logprobs": "top_logprobs"},
        )

    def _top_logprobs(self) -> int | None:
        """Return the number of alternatives per token; None: no logprobs."""
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise FieldError("top_logprobs", f"must be at least 0 and at most {MAX_LOGPROBS}")
        if top and not self.logprobs:
            raise FieldError("top_logprobs", "needs logprobs: true")
        return (top or 0) if self.logprobs else None


class PromptOrMessages(TemplateFields):
    """A request with either `messages` or `prompt`. Subclasses declare `prompt`."""

    model: str | None = None
    messages: Items[ChatMessage] | None = Field(None, max_length=MAX_MESSAGES)

    def check_alternatives(self, prompt: object) -> None:
        """Raise InvalidRequestError if both messages and a prompt were given."""
        if prompt is not None and self.messages is not None:
            raise InvalidRequestError("give either prompt or messages", param="prompt")
