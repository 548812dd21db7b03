"""A request for one answer to a conversation, in a form common to all APIs.

With `truncation: "auto"` the oldest turns of one longer than the context are dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vlm_serve.engine.requests.request import NextTurn
from vlm_serve.engine.requests.tenant import Tenant
from vlm_serve.errors import ContextLengthError, FieldError, InvalidRequestError
from vlm_serve.preprocess.identity.keys import KeyScope
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.loading import is_remote
from vlm_serve.preprocess.reading.conversation import Conversation, MediaName, StoredUpload
from vlm_serve.preprocess.reading.turns import fit_systems
from vlm_serve.preprocess.text.rendering import Rendering
from vlm_serve.preprocess.text.template import SWITCH, TemplateTraits
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.generation import (
    Generation,
    Task,
    reasoning_parser_of,
    thought_of,
)
from vlm_serve.server.answers.output_parser import OutputParser, ParsedTurn
from vlm_serve.server.answers.pieces import ToolForm, form_of
from vlm_serve.server.api.shared.answer import Incoming
from vlm_serve.server.api.shared.fields import AnswerRequest
from vlm_serve.server.api.shared.request_body import affinity_of
from vlm_serve.server.api.shared.sampling import ToolChoice, with_tools
from vlm_serve.server.http.errors import renamed_params
from vlm_serve.server.service import Preparation, Service
from vlm_serve.system.stopping import Stop

SCHEMES = ("data:", "http://", "https://", "file://")
"""Schemes of URLs that clients may name; the fetching code decides where a URL may point."""


def check_media_sources(conversation: Conversation) -> None:
    """Refuse paths and bytes, which media may have in Python only. Raises InvalidRequestError."""
    for part in conversation.media:
        listed = isinstance(part.source, list) and part.modality == "video"
        urls = part.source if listed else [part.head or part.source]
        if not urls or not all(_is_url(url) for url in urls):
            raise InvalidRequestError(
                f"{part.param} must be a URL that begins with {', '.join(SCHEMES)}"
                + (", or a list of such URLs of frames" if part.modality == "video" else ""),
                param=part.param,
            )


def _is_url(url: object) -> bool:
    if isinstance(url, MediaName | StoredUpload):  # no text of a body is one
        return True
    return isinstance(url, str) and url[:8].lower().startswith(SCHEMES)


def set_variables(
    conversation: Conversation,
    traits: TemplateTraits,
    *,
    effort: str | None = None,
    effort_name: str = "reasoning_effort",
    switched: bool = True,
    verbosity: str | None = None,
    verbosity_name: str = "verbosity",
) -> Conversation:
    """Return the conversation as a template takes it, with variables for effort and verbosity.

    Settings that the template does not know are named in `ignored`.

    Args:
        effort: the client's effort of thinking, under any API's name.
        effort_name, verbosity_name: the API's names of the two fields.
        switched: any effort but "none" also turns thinking on.
    """
    fitted = fit_systems(conversation, anywhere=traits.late_systems)
    given = fitted.template_kwargs
    unread = [name for name in given if name not in traits.variables]
    fitted.ignored.extend(f"chat_template_kwargs.{name}" for name in unread)
    variables = traits.effort_variables(effort)
    off = effort == "none"
    known = "reasoning_effort" in variables or (off and SWITCH in variables)
    if effort not in (None, "medium") and not known:
        fitted.ignored.append(effort_name)
    if verbosity not in (None, "medium") and "verbosity" not in traits.variables:
        fitted.ignored.append(verbosity_name)
    if not switched and not off:
        variables.pop(SWITCH, None)
    fitted.default_kwargs(verbosity=verbosity, **variables)
    return fitted


def prepare(
    service: Service,
    conversation: Conversation,
    scope: KeyScope,
    answer_tokens: int | None = None,
    last_tokens: int | None = None,
) -> Preparation:
    """Return the prompt, or the work left if there are media; call it on a preparation thread.

    Args:
        scope: whose prompt it is.
        answer_tokens: tokens reserved for the answer. If the conversation is too long, its oldest
            turns are dropped. None: a conversation that is too long is refused.
        last_tokens: only so many tokens at the prompt's end are used, unless there are media.

    Raises:
        InvalidRequestError: the conversation makes no prompt, or a client may not name its media.
    """
    check_media_sources(conversation)
    preprocessor = service.engine.preprocessor
    if answer_tokens is not None:
        max_tokens = service.engine.max_model_len - max(answer_tokens, 1)

        def truncated(stop: Stop) -> Prompt:
            prompt_of = partial(preprocessor.prepare, **scope.options, stop=stop)
            return prepare_truncated(conversation, prompt_of, max_tokens)

        return truncated if conversation.media else truncated(Stop())
    if any(part.document and is_remote(part) for part in conversation.media):
        return lambda stop: preprocessor.prepare(conversation, **scope.options, stop=stop)
    rendering: Rendering = preprocessor.begin(
        conversation, **scope.options, last_tokens=last_tokens
    )
    if rendering.media:
        return rendering
    prompt: Prompt = preprocessor.finish(rendering, [])
    return prompt.last_tokens(last_tokens)


def prepare_tokens(
    service: Service, prompt: str | list[int], scope: KeyScope, count: int | None = None
) -> Prompt:
    """Return the prompt for text or token ids; call it on a preparation thread.

    Args:
        scope: whose prompt it is.
        count: only so many tokens at the end are used; None: all are.

    Raises:
        InvalidRequestError: an id is outside the vocabulary.
    """
    preprocessor = service.engine.preprocessor
    if not isinstance(prompt, str):
        ids = prompt if count is None else prompt[-count:]
    elif count is None:
        ids = preprocessor.encode(prompt, cache_salt=scope.cache_salt)
    else:
        ids = preprocessor.tokenizer.encode_end(prompt, count)
    prepared: Prompt = preprocessor.prepare_tokens(ids, **scope.options)
    return prepared


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request, parsed from one of the APIs.

    Attributes:
        params: with the constraint on the answer's text.
        choice: functions that may or must be called.
        form_field: the request's field with that constraint, if any.
        names: internal field name -> the API's name for it, for errors.
        answer_tokens: see `prepare`.
        clamped: an answer longer than the context is cut there instead of refused.
    """

    conversation: Conversation
    params: SamplingParams
    choice: ToolChoice
    form_field: str = "structured_outputs"
    names: Mapping[str, str] = field(default_factory=dict)
    answer_tokens: int | None = None
    clamped: bool = False

    def prepare(self, service: Service, scope: KeyScope) -> Preparation:
        """Return the prompt or the work left; it raises as `prepare` does."""
        count = self.params.kept_prompt_tokens(service.engine.max_model_len)
        prepared = prepare(service, self.conversation, scope, self.answer_tokens, count)
        cut = self.params.truncate_prompt_tokens not in (None, -1)
        if cut and not isinstance(prepared, Prompt):
            raise FieldError("truncate_prompt_tokens", "is not possible for a prompt with media")
        return prepared


async def count_tokens(
    service: Service, parsed: ParsedRequest, cache_salt: str, tenant: Tenant
) -> int:
    """Return the number of the prompt's tokens, media included. Nothing runs.

    Raises:
        VlmServeError: see `Admission.admitted` and `Service.prepare`.
    """
    with service.admission.admitted(tenant), renamed_params(parsed.names):
        return len(await service.prepare(partial(parsed.prepare, service, KeyScope(cache_salt))))


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """How answers to a conversation are parsed.

    Attributes:
        tools: parameter schemas of the callable functions, by name; None: do not parse tool calls.
        tool_form: syntax of tool calls.
        parallel: an answer may have more than one call.
    """

    tools: Mapping[str, Any] | None
    tool_form: ToolForm
    parallel: bool

    def parser(self, task: Task, prompt: Prompt) -> OutputParser:
        """Return a new parser for one choice of the answer to a prompt."""
        thought = thought_of(task, prompt)
        return OutputParser(
            reasoning=None if thought is None else thought.opened,
            tools=self.tools,
            form=self.tool_form,
            parallel=self.parallel,
            continued=task.continued,
            enforced=task.params.structured_outputs is not None,
        )

    def next_turn(self, task: Task, prompt: Prompt) -> NextTurn | None:
        """Return the next turn of a client that sends the parsed answer back."""
        if prompt.next_turn is None:
            return None
        kind = "agent" if self.tools else "chat"
        return ParsedTurn(kind, prompt.next_turn, partial(self.parser, task, prompt))


@dataclass(frozen=True, slots=True)
class ConversationTask:
    """How to answer a validated request.

    Attributes:
        forms: how the answer is parsed.
        created: Unix time in seconds.
    """

    task: Task
    model: str
    forms: AnswerForms
    created: int

    def parser(self, generation: Generation) -> OutputParser:
        """Return a new parser for one choice of the answer."""
        return self.forms.parser(self.task, generation.prompt)


def conversation_task(
    incoming: Incoming, body: AnswerRequest, parsed: ParsedRequest
) -> ConversationTask:
    """Return how to answer a request.

    Raises:
        VlmServeError: the server refuses the request before any work is done.
    """
    service, params = incoming.service, parsed.params
    choice = _enforceable(service, parsed.choice)
    keeps_end = params.include_stop_str_in_output and not params.skip_special_tokens
    if choice.mode != "none" and keeps_end:
        raise InvalidRequestError(
            "include_stop_str_in_output does not go with skip_special_tokens: false and tools: the "
            "token that ends the answer would be text after a call",
            param="include_stop_str_in_output",
        )
    schemas = parsed.conversation.functions
    plain = params.structured_outputs
    form = with_tools(plain, choice, schemas, parsed.form_field, _tool_form(service))
    form_field = parsed.form_field if form is plain else "tools"
    scope = incoming.key_scope(body)
    forms = AnswerForms(
        None if choice.mode == "none" else {name: schemas[name] or {} for name in choice.names},
        _tool_form(service),
        choice.parallel,
    )
    return ConversationTask(
        task=incoming.task(
            body,
            partial(parsed.prepare, service, scope),
            dataclasses.replace(params, structured_outputs=form),
            reasoning=reasoning_parser_of(service),
            calls=choice.mode != "none" and form is None,
            continued=parsed.conversation.continue_final_message,
            clamped=parsed.clamped,
            names={**parsed.names, "structured_outputs": form_field},
            affinity=affinity_of(incoming.scope),
            next_turn=forms.next_turn,
        ),
        model=service.state.resolve_model(body.model),
        forms=forms,
        created=incoming.created,
    )


def _tool_form(service: Service) -> ToolForm:
    """Return the form of tool calls: the configured one, or else the chat template's."""
    return form_of(
        service.config.tool_call_parser, service.engine.preprocessor.template_traits.tool_form
    )


def _enforceable(service: Service, choice: ToolChoice) -> ToolChoice:
    if service.config.tool_call_parser != "none":
        return choice
    if choice.mode == "required":
        raise InvalidRequestError(
            "tool_choice: this server runs without a tool call parser", param="tool_choice"
        )
    return ToolChoice("none", (), parallel=True)


def prepare_truncated(
    conversation: Conversation, prepare: Callable[[Conversation], Prompt], max_tokens: int
) -> Prompt:
    """Return the conversation's prompt, without its oldest turns if it is too long.

    A turn begins with a user's message and ends before the next one. System messages at the
    beginning stay.

    Turns are dropped in steps that grow with the conversation. The kept part then begins at the
    same turn for several requests, so the cache has its prefix.

    Args:
        max_tokens: maximum number of the prompt's tokens.

    Raises:
        ContextLengthError: even the last turn does not fit. `prepare` may raise other errors.
    """

    def fitting_prompt(dropped: int) -> Prompt | None:
        try:
            prompt = prepare(drop_turns(conversation, starts, dropped))
        except ContextLengthError:
            return None
        return prompt if len(prompt) <= max_tokens else None

    starts = turn_starts(conversation)
    last = max(len(starts) - 1, 0)
    whole = fitting_prompt(0)
    if whole is not None:
        return whole
    low, high = 0, last  # Dropping `low` turns is too few; `high` is the most.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fitting_prompt(middle) is not None else (middle, high)
    step = 1 << max((last + 1 - high) // 4, 1).bit_length() - 1
    dropped = min(-(-high // step) * step, last)
    return prepare(drop_turns(conversation, starts, dropped))


def turn_starts(conversation: Conversation) -> list[int]:
    """Return the index of each turn's first message; initial system messages belong to no turn."""
    starts = []
    for index, message in enumerate(conversation.messages):
        before = conversation.messages[index - 1]["role"] if index else "system"
        if message["role"] == "user" and before != "user":
            starts.append(index)
    return starts


def drop_turns(conversation: Conversation, starts: list[int], dropped: int) -> Conversation:
    """Return the conversation without its first `dropped` turns and their media."""
    if not dropped:
        return conversation
    turns = conversation.turns()
    kept = turns[: starts[0]] + turns[starts[dropped] :]
    return replace(
        conversation,
        messages=[message for message, _ in kept],
        media=[medium for _, media in kept for medium in media],
    )
