"""A request for one answer to a conversation, in a form common to all APIs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import Scope

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.messages import Conversation
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.preprocess.rendering import Rendering
from vlm_serve.preprocess.stopping import Stop
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.generation import (
    Generation,
    Task,
    reasoning_parser_of,
    thought_of,
)
from vlm_serve.server.answers.output_parser import OutputParser
from vlm_serve.server.answers.pieces import ToolForm, form_of
from vlm_serve.server.api.fields import AnswerRequest
from vlm_serve.server.api.media_sources import check_media_sources
from vlm_serve.server.api.request_affinity import affinity_of
from vlm_serve.server.api.structured import ToolChoice, with_tools
from vlm_serve.server.api.truncation import prepare_truncated
from vlm_serve.server.failover.attempt import attempt_of, created_of
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.server.http.request_id import request_id_of, trace_context_of
from vlm_serve.server.http.tenants import salt_of
from vlm_serve.server.service import Preparation, Service


@dataclass(frozen=True, slots=True)
class ChatInput:
    """The input of a chat prompt.

    Attributes:
        read: reads the conversation. It may be long, so preparation threads call it.
        tools: as templates see them, `{"type": "function", "function": {...}}`.
        add_generation_prompt, continue_final_message, template_kwargs, media_io_kwargs,
            mm_processor_kwargs: see `Preprocessor.prepare`.
        answer_tokens: tokens reserved for the answer. If the conversation is too long, its oldest
            turns are dropped. None: a conversation that is too long is refused.
    """

    read: Callable[[], Conversation]
    tools: list[dict[str, Any]] = field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    answer_tokens: int | None = None

    @property
    def function_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    @property
    def schemas(self) -> dict[str, Any]:
        """Schemas of the parameters, by function name."""
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function.get("parameters") for function in functions}


def with_thinking(given: ChatInput, effort: str | None) -> ChatInput:
    """Return the input with thinking on or off, the only levels in Qwen's templates.

    Args:
        effort: "none" turns thinking off, any other value turns it on; None changes nothing.
    """
    if effort is None:
        return given
    kwargs = {"enable_thinking": effort != "none"} | (given.template_kwargs or {})
    return dataclasses.replace(given, template_kwargs=kwargs)


def with_variable(given: ChatInput, name: str, value: str | None) -> ChatInput:
    """Return the input with a template variable set; None changes nothing."""
    if value is None:
        return given
    return dataclasses.replace(given, template_kwargs={name: value} | (given.template_kwargs or {}))


def template_ignores(service: Service, name: str, value: str | None) -> bool:
    """Return True if a setting has no effect, since the chat template has no such variable."""
    known = service.engine.preprocessor.template_variables
    return value not in (None, "medium") and name not in known


def prepare(service: Service, given: ChatInput, cache_salt: str) -> Preparation:
    """Return the prompt, or the work left if there are media; call it on a preparation thread.

    Raises:
        InvalidRequestError: the conversation makes no prompt, or a client may not name its media.
    """
    conversation = given.read()
    check_media_sources(conversation)
    preprocessor = service.engine.preprocessor
    options: dict[str, Any] = {
        "tools": given.tools or None,
        "add_generation_prompt": given.add_generation_prompt,
        "continue_final_message": given.continue_final_message,
        "chat_template_kwargs": given.template_kwargs,
        "media_io_kwargs": given.media_io_kwargs,
        "mm_processor_kwargs": given.mm_processor_kwargs,
        "cache_salt": cache_salt,
    }
    if given.answer_tokens is not None:
        max_tokens = service.engine.max_model_len - max(given.answer_tokens, 1)

        def truncated(stop: Stop) -> Prompt:
            prompt_of = partial(preprocessor.prepare, **options, stop=stop)
            return prepare_truncated(conversation, prompt_of, max_tokens)

        return truncated if conversation.media else truncated(Stop())
    rendering: Rendering = preprocessor.begin(conversation, **options)
    if rendering.media:
        return rendering
    prompt: Prompt = preprocessor.finish(rendering, [])
    return prompt


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request, parsed from one of the APIs.

    Attributes:
        params: with the constraint on the answer's text.
        choice: functions that may or must be called.
        form_field: the request's field with that constraint, if any.
        names: internal field name -> the API's name for it, for errors.
    """

    input: ChatInput
    params: SamplingParams
    choice: ToolChoice
    form_field: str = "structured_outputs"
    names: Mapping[str, str] = field(default_factory=dict)


async def count_tokens(service: Service, parsed: ParsedRequest, cache_salt: str) -> int:
    """Return the number of the prompt's tokens, media included. Nothing runs.

    Raises:
        VlmServeError: see `Admission.admitted` and `Service.prepare`.
    """
    with service.admission.admitted(), renamed_params(parsed.names):
        return len(await service.prepare(partial(prepare, service, parsed.input, cache_salt)))


@dataclass(frozen=True, slots=True)
class ConversationTask:
    """How to answer a validated request.

    Attributes:
        tools: parameter schemas of the callable functions, by name; None: do not parse tool calls.
        tool_form: syntax of tool calls.
        parallel: the answer may have more than one call.
        created: Unix time in seconds.
    """

    task: Task
    model: str
    tools: Mapping[str, Any] | None
    tool_form: ToolForm
    parallel: bool
    created: int

    def parser(self, generation: Generation) -> OutputParser:
        """Return a new parser for one choice of the answer."""
        thought = thought_of(self.task, generation.prompt)
        return OutputParser(
            reasoning=None if thought is None else thought.opened,
            tools=self.tools,
            form=self.tool_form,
            parallel=self.parallel,
            continued=self.task.continued,
            enforced=self.task.params.structured_outputs is not None,
        )


def conversation_task(
    service: Service, scope: Scope, body: AnswerRequest, parsed: ParsedRequest, arrival: float
) -> ConversationTask:
    """Return how to answer a request.

    Raises:
        VlmServeError: the server refuses the request before any work is done.
    """
    choice = _enforceable(service, parsed.choice)
    schemas = parsed.input.schemas
    plain = parsed.params.structured_outputs
    form = with_tools(plain, choice, schemas, parsed.form_field, _tool_form(service))
    form_field = parsed.form_field if form is plain else "tools"
    salt = salt_of(scope, body.cache_salt)
    return ConversationTask(
        task=Task(
            prepare=partial(prepare, service, parsed.input, salt),
            params=dataclasses.replace(parsed.params, structured_outputs=form),
            request_id=body.request_id or request_id_of(scope),
            arrival=arrival,
            priority=body.priority or 0,
            reasoning=reasoning_parser_of(service),
            calls=choice.mode != "none" and form is None,
            continued=parsed.input.continue_final_message,
            trace=trace_context_of(scope),
            names={**parsed.names, "structured_outputs": form_field},
            affinity=affinity_of(scope),
            attempt=attempt_of(scope),
        ),
        model=service.state.resolve_model(body.model),
        tools=None
        if choice.mode == "none"
        else {name: schemas[name] or {} for name in choice.names},
        tool_form=_tool_form(service),
        parallel=choice.parallel,
        created=created_of(scope),
    )


def _tool_form(service: Service) -> ToolForm:
    """Return the form of tool calls: the configured one, or else the chat template's."""
    return form_of(service.config.tool_call_parser, service.engine.preprocessor.tool_form)


def _enforceable(service: Service, choice: ToolChoice) -> ToolChoice:
    if service.config.tool_call_parser != "none":
        return choice
    if choice.mode == "required":
        raise InvalidRequestError(
            "tool_choice: this server runs without a tool call parser", param="tool_choice"
        )
    return ToolChoice("none", (), parallel=True)
