"""The request body of POST /v1/responses, and parsing it."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, get_args

from pydantic import Field

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.values import unsupported
from vlm_serve.preprocess.text.template import TemplateTraits
from vlm_serve.server.api.shared.conversation import ParsedRequest, set_variables
from vlm_serve.server.api.shared.fields import (
    MAX_ANSWER_ID,
    MAX_TOOLS,
    AnswerRequest,
    Items,
    PromptCacheOptions,
    RequestModel,
    Table,
    Verbosity,
    Whole,
)
from vlm_serve.server.api.shared.sampling import (
    json_schema_form,
    sampling_names,
    sampling_of,
    simple_form,
    tool_choice_of,
    with_sampling,
)
from vlm_serve.server.api.shared.unknown_fields import unimplemented_in
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.structured_outputs import StructuredOutputs

RESPONSES_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
}
RESPONSES_UNIMPLEMENTED = unimplemented_in("responses") | RESPONSES_REFUSED

_NAMES = sampling_names("responses") | {"messages": "input", "logprobs": "top_logprobs"}
_LOGPROBS = "message.output_text.logprobs"
_THOUGHT = "reasoning.encrypted_content"
_OF_SERVERS = re.compile(r"[a-z_]+_(call|output)\.[a-z_.]+|message\.input_image\.image_url")
"""What can be included of hosted tools, which are left out, and of what the client has itself."""


class ResponsesTool(RequestModel):
    type: str = Field(max_length=64)
    name: str | None = Field(None, min_length=1, max_length=128)
    description: str | None = None
    parameters: Table[Any] | None = None
    strict: bool | None = None


class ResponsesCacheOptions(PromptCacheOptions):
    prewarm: bool | None = None
    comparison_response_id: str | None = Field(None, max_length=MAX_ANSWER_ID)


@with_sampling("responses")
class ResponsesRequest(AnswerRequest):
    input: str | Items[Table[Any]]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = None
    max_output_tokens: Whole | None = None
    tools: Items[ResponsesTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | Table[Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Table[Any] | None = None
    text: Table[Any] | None = None
    metadata: Table[str] | None = Field(None, max_length=16)
    include: Items[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Whole | None = None
    chat_template_kwargs: Table[Any] | None = None
    prompt_cache_options: ResponsesCacheOptions | None = None

    @property
    def only_prompt(self) -> bool:
        """True if the prompt is to be cached for later."""
        return bool(self.prompt_cache_options and self.prompt_cache_options.prewarm)

    @property
    def compared(self) -> str | None:
        """Id of the response whose prompt this one is compared with."""
        options = self.prompt_cache_options
        return None if options is None else options.comparison_response_id

    @property
    def custom_tools(self) -> frozenset[str | None]:
        """Names of the tools that take one text instead of arguments."""
        return frozenset(tool.name for tool in self.tools or () if tool.type == "custom")

    def items(self) -> list[dict[str, Any]]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def parsed(self, conversation: Conversation, traits: TemplateTraits) -> ParsedRequest:
        """Parse the request.

        Raises:
            InvalidRequestError: a field is invalid; the error names it.
        """
        self._check_numbers(conversation)
        for at, name in enumerate(self.include or ()):
            if _OF_SERVERS.fullmatch(name):
                conversation.ignored.append(f"include[{at}]")
            elif name not in (_LOGPROBS, _THOUGHT):
                raise unsupported("include", name)
        if self.prompt_cache_options is not None:
            conversation.ignored += self.prompt_cache_options.ignored
        conversation = set_variables(
            conversation,
            traits,
            effort=self.effort,
            effort_name="reasoning.effort",
            verbosity=self.verbosity,
            verbosity_name="text.verbosity",
        )
        with renamed_params(_NAMES):
            params = sampling_of(
                "responses", self, logprobs=self.logprobs, structured_outputs=self._form()
            )
        return ParsedRequest(
            conversation,
            params,
            tool_choice_of(
                self.tool_choice, list(conversation.functions), self.parallel_tool_calls
            ),
            "text",
            _NAMES,
            (self.max_output_tokens or 0) if self.truncation == "auto" else None,
        )

    def _check_numbers(self, conversation: Conversation) -> None:
        """Refuse infinite numbers: the response repeats these fields, and JSON has no infinity."""
        extra = [tool.model_extra for tool in self.tools or ()]
        tools = [conversation.tools, extra]
        given = {"tools": tools, "tool_choice": self.tool_choice, "text": self.text}
        for name, value in given.items():
            try:
                json.dumps(value, allow_nan=False)
            except ValueError:
                raise FieldError(name, "has a number that is too large") from None

    @property
    def logprobs(self) -> int | None:
        """Alternatives per token of the answer's text; None: no logprobs."""
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

    @property
    def effort(self) -> str | None:
        effort = (self.reasoning or {}).get("effort")
        if effort is not None and not isinstance(effort, str):
            raise FieldError("reasoning.effort", "must be text")
        return effort

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
