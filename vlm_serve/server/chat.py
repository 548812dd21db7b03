"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.body import read_json
from vlm_serve.server.chat_choice import ChatChoiceState
from vlm_serve.server.fields import ignored_fields, ignored_header
from vlm_serve.server.generation import Generation, Task, answering
from vlm_serve.server.logprobs import prompt_logprobs_body
from vlm_serve.server.media_sources import check_media_sources
from vlm_serve.server.output_parser import THINK_START, OutputParser
from vlm_serve.server.protocol import ChatCompletionRequest, ChatPrompt
from vlm_serve.server.reports import cache_report_body, usage_body
from vlm_serve.server.request_id import request_id_of
from vlm_serve.server.responses import ChatCompletion
from vlm_serve.server.service import Service
from vlm_serve.server.streaming import Chunks, stream_response, until_disconnected
from vlm_serve.server.structured import ToolChoice, with_tools
from vlm_serve.server.tenants import salt_of


def preparing(service: Service, body: ChatPrompt, cache_salt: str | None) -> Callable[[], Prompt]:
    """What makes the prompt of a chat request; to be run on a preparation thread.

    Raises InvalidRequestError for media that a client may not name.
    """
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    check_media_sources(messages)
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or []]
    for tool in tools:
        tool.setdefault("type", "function")
    add_prompt = body.add_generation_prompt
    continues = bool(body.continue_final_message)
    if continues and add_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    return partial(
        service.engine.preprocessor.prepare,
        messages,
        tools=tools or None,
        add_generation_prompt=not continues if add_prompt is None else add_prompt,
        continue_final_message=continues,
        chat_template_kwargs=body.chat_template_kwargs,
        cache_salt=cache_salt or "",
    )


def _tool_choice(service: Service, body: ChatCompletionRequest) -> ToolChoice:
    names = [tool.function.name for tool in body.tools or []]
    choice = ToolChoice.of(body.tool_choice, names, body.parallel_tool_calls)
    if service.config.tool_call_parser != "none":
        return choice
    if choice.mode == "required":
        raise InvalidRequestError(
            "tool_choice: this server runs without a tool call parser", param="tool_choice"
        )
    return ToolChoice("none", (), parallel=True)


def _params(body: ChatCompletionRequest, choice: ToolChoice) -> tuple[SamplingParams, str]:
    """Sampling options, the form of the answer included, and the field that the form comes from."""
    params = body.sampling_params()
    schemas = {tool.function.name: tool.function.parameters for tool in body.tools or []}
    form = with_tools(params.structured_outputs, choice, schemas, body.form_field)
    field = body.form_field if form is params.structured_outputs else "tools"
    return dataclasses.replace(params, structured_outputs=form), field


def _tool_schemas(body: ChatCompletionRequest, choice: ToolChoice) -> dict[str, Any] | None:
    """Parameter schemas by function, None if tool calls are not to be parsed."""
    if choice.mode == "none":
        return None
    return {tool.function.name: tool.function.parameters or {} for tool in body.tools or []}


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A validated chat request."""

    body: ChatCompletionRequest
    task: Task
    model: str
    tools: Mapping[str, Any] | None
    created: int

    @property
    def response_id(self) -> str:
        return f"chatcmpl-{self.task.request_id}"


async def chat_completions(service: Service, request: Request) -> Response:
    """Answers one conversation, whole or as a stream.

    Raises VlmServeError; ClientGoneError if nobody waits for the answer any more.
    """
    arrival = time.monotonic()
    body = await read_json(request, ChatCompletionRequest, service.config.max_body_bytes)
    headers = ignored_header(ignored_fields(body.model_extra or {}))
    chat = chat_task(service, request, body, arrival)
    if body.stream:
        return await stream_response(request, _chunks(service, chat), headers, chat.task.request_id)
    answer = await until_disconnected(request, _whole(service, chat))
    return JSONResponse(answer.model_dump(), headers=headers)


def chat_task(
    service: Service, request: Request, body: ChatCompletionRequest, arrival: float
) -> ChatTask:
    """Checks a chat request, whichever API it came over, and says how to answer it.

    Raises VlmServeError for what the server refuses before any work is done.
    """
    body.check_stream_options()
    choice = _tool_choice(service, body)
    params, form_field = _params(body, choice)
    return ChatTask(
        body=body,
        task=Task(
            prepare=preparing(service, _with_effort(body), salt_of(request.scope, body.cache_salt)),
            params=params,
            request_id=body.request_id or request_id_of(request.scope),
            arrival=arrival,
            priority=body.priority or 0,
            reasoning=service.config.reasoning_parser != "none",
            form_field=form_field,
        ),
        model=service.resolve_model(body.model),
        tools=_tool_schemas(body, choice),
        created=int(time.time()),
    )


def _with_effort(body: ChatCompletionRequest) -> ChatCompletionRequest:
    """Qwen's templates know thinking as on or off: effort "none" is off, any other is on."""
    if body.reasoning_effort is None:
        return body
    kwargs = {"enable_thinking": body.reasoning_effort != "none"}
    return body.model_copy(
        update={"chat_template_kwargs": kwargs | (body.chat_template_kwargs or {})}
    )


def output_parser(service: Service, chat: ChatTask, generation: Generation) -> OutputParser:
    """A new parser for one choice of the answer."""
    reasoning = None
    if service.config.reasoning_parser != "none":
        reasoning = generation.prompt.text.rstrip().endswith(THINK_START)
    return OutputParser(reasoning=reasoning, tools=chat.tools)


def _choices(service: Service, chat: ChatTask, generation: Generation) -> list[ChatChoiceState]:
    return [
        ChatChoiceState(
            index=index,
            parser=output_parser(service, chat, generation),
            tokenizer=service.tokenizer,
            top_logprobs=chat.body.top_logprobs or 0 if chat.body.logprobs else None,
            keep_token_ids=bool(chat.body.return_token_ids),
        )
        for index in range(chat.task.params.n)
    ]


async def _whole(service: Service, chat: ChatTask) -> ChatCompletion:
    async with answering(service, chat.task) as generation:
        choices = _choices(service, chat, generation)
        async for delta in generation.deltas():
            choices[delta.index].push(delta)
    prompt = generation.prompt
    return ChatCompletion(
        id=chat.response_id,
        created=chat.created,
        model=chat.model,
        choices=[choice.whole() for choice in choices],
        usage=usage_body(generation.usage, prompt),
        cache_report=cache_report_body(generation.cache_report) if chat.body.cache_report else None,
        prompt_token_ids=list(prompt.token_ids) if chat.body.return_token_ids else None,
        prompt_logprobs=prompt_logprobs_body(
            service.tokenizer, prompt.token_ids, generation.prompt_logprobs
        ),
    )


async def _chunks(service: Service, chat: ChatTask) -> Chunks:
    async with answering(service, chat.task) as generation:
        async for chunk in _bodies(service, chat, generation):
            yield chunk


async def _bodies(service: Service, chat: ChatTask, generation: Generation) -> Chunks:
    """The stream's bodies: choices as they grow, then the usage if it was asked for."""
    body = chat.body
    choices = _choices(service, chat, generation)
    base: dict[str, Any] = {
        "id": chat.response_id,
        "object": "chat.completion.chunk",
        "created": chat.created,
        "model": chat.model,
    }
    with_usage = body.stream_option("include_usage")
    continuous = body.stream_option("continuous_usage_stats")

    def usage() -> dict[str, Any]:
        return usage_body(generation.usage, generation.prompt).model_dump()

    def last_words() -> dict[str, Any]:
        if not body.cache_report or generation.cache_report is None:
            return {}
        return {"cache_report": dataclasses.asdict(generation.cache_report)}

    extra: dict[str, Any] = {}
    if body.return_token_ids:
        extra["prompt_token_ids"] = list(generation.prompt.token_ids)
    async for delta in generation.deltas():
        parts = choices[delta.index].push(delta)
        for number, part in enumerate(parts, start=1):
            ends = not generation.unfinished and number == len(parts)
            if with_usage:
                extra["usage"] = usage() if continuous else None
            if ends and not with_usage:
                extra |= last_words()
            yield base | {"choices": [part]} | extra
            extra = {}
    if with_usage:
        yield base | {"choices": [], "usage": usage()} | last_words()
