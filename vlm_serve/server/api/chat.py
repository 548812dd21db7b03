"""The route of POST /v1/chat/completions, and its response, complete and as a stream.

The bodies are OpenAI's; docs/http-api.md lists the additions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Literal

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.answers.output_parser import OutputParser
from vlm_serve.server.answers.pieces import Piece
from vlm_serve.server.api.shared.answer import Incoming, ResponseSpec, answer_prompt
from vlm_serve.server.api.shared.chat_request import ChatCompletionRequest
from vlm_serve.server.api.shared.chunks import ChunkStream, Part
from vlm_serve.server.api.shared.conversation import ConversationTask, conversation_task
from vlm_serve.server.api.shared.fields import (
    CacheReportBody,
    ChatLogprobs,
    Optional,
    PromptLogprobsBody,
    UsageBody,
    routed_experts_fields,
)
from vlm_serve.server.api.shared.logprobs import Entry, chat_logprobs, prompt_logprobs_body
from vlm_serve.server.api.shared.output_blocks import CustomInput, input_of
from vlm_serve.server.api.shared.unknown_fields import ignored_fields, ignored_header
from vlm_serve.server.failover.attempt import Attempt, new_token
from vlm_serve.server.service import Service


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a conversation. It raises as `respond` does."""
    return await answer_prompt(service, request, "chat", ChatCompletionRequest, _spec)


def chat_task(
    incoming: Incoming, body: ChatCompletionRequest, conversation: Conversation
) -> tuple[ConversationTask, Mapping[str, str]]:
    """Return how to answer a chat request, and the header that names what is ignored.

    Raises:
        VlmServeError: the request is invalid.
    """
    ignored = ignored_fields(body.model_extra or {})
    parsed = body.parsed(conversation, incoming.service.engine.preprocessor.template_traits)
    chat = conversation_task(incoming, body, parsed)
    return chat, ignored_header(ignored, parsed.conversation.ignored)


def _spec(
    incoming: Incoming, body: ChatCompletionRequest, conversation: Conversation
) -> ResponseSpec:
    chat, headers = chat_task(incoming, body, conversation)
    stream_of = partial(ChatStream, body, chat, incoming.service.tokenizer)
    return ResponseSpec([chat.task], stream_of, bool(body.stream), headers)


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
    tool_calls: Optional[list[ToolCall | dict[str, Any]]] = None
    function_call: Optional[FunctionCall] = None


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


class ChatChoiceState:
    """Gathers the deltas of one choice."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        parser: OutputParser,
        tokenizer: Tokenizer,
        index: int,
        attempt: Attempt | None = None,
    ) -> None:
        self._index = index
        self._parser = parser
        self._tokenizer = tokenizer
        self._top_logprobs = body.top_logprobs or 0 if body.logprobs else None
        self._keep_token_ids = bool(body.return_token_ids)
        self._attempt = attempt
        self._old, self._custom = body.old_functions, body.custom_tools
        self._inputs: dict[int, CustomInput] = {}
        self._started = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._logprobs: list[Entry] = []
        self._token_ids: list[int] = []
        self._finish_reason = ""
        self._stop_reason: int | str | None = None
        self._experts: dict[str, Any] = {}

    def push(self, deltas: Sequence[Delta]) -> list[Part]:
        """Add deltas and return the stream's parts for them; the first part has the role. What one
        delta tells shares a part, what several do only if it is of the same kind."""
        parts = []
        if not self._started:
            self._started = True
            parts.append(self._part({"role": "assistant", "content": ""}))
        text, last = "".join(delta.text for delta in deltas), deltas[-1]
        pieces = self._parser.feed(text) if text else []
        if last.finish_reason is not None:
            pieces += self._parser.finish(cut=last.finish_reason == "length")
        token_ids = [token for delta in deltas for token in delta.token_ids]
        logprobs = [entry for delta in deltas for entry in self._take_logprobs(delta)]
        if self._keep_token_ids:
            self._token_ids += token_ids
        runs = [pieces]
        if len(deltas) > 1 and pieces:
            runs = [list(run) for _, run in groupby(pieces, lambda piece: piece.kind[:4])]
        for number, run in enumerate(runs, start=1):
            ends = last.finish_reason is not None and number == len(runs)
            fields = self._take(run, final=ends)
            if fields or logprobs or (self._keep_token_ids and token_ids):
                part = self._part(fields or {"content": ""})
                if logprobs:
                    part["logprobs"] = {"content": logprobs, "refusal": None}
                if self._keep_token_ids:
                    part["token_ids"] = token_ids
                parts.append(part)
                logprobs, token_ids = [], []
        if last.finish_reason is not None:
            parts.append(self._finish(last))
        return parts

    def _part(self, fields: dict[str, Any]) -> Part:
        return {"index": self._index, "delta": fields, "logprobs": None, "finish_reason": None}

    def _take(self, pieces: Iterable[Piece], *, final: bool) -> dict[str, Any]:
        """Keep the pieces, and return them as the fields of a stream's `delta`."""
        fields: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.kind == "content":
                self._content.append(piece.text)
                fields["content"] = fields.get("content", "") + piece.text
            elif piece.kind == "reasoning":
                self._reasoning.append(piece.text)
                for name in ("reasoning", "reasoning_content"):
                    fields[name] = fields.get(name, "") + piece.text
            elif piece.kind == "tool_name":
                function = FunctionCall(name=piece.text, arguments="")
                token = new_token(self._attempt, "call", self._index, len(self._calls))
                call = ToolCall(id=f"call_{token}", function=function)
                self._calls.append(call)
                calls[piece.call] = {"index": piece.call, **call.model_dump()}
                if piece.text in self._custom:
                    self._inputs[piece.call] = CustomInput()
            else:
                self._calls[piece.call].function.arguments += piece.text
                entry = calls.setdefault(
                    piece.call, {"index": piece.call, "function": {"arguments": ""}}
                )
                entry["function"]["arguments"] += piece.text
        if self._old and calls:
            return fields | {"function_call": calls[0]["function"]}
        for index, taking in self._inputs.items():
            part = calls.get(index, {"index": index, "function": {"arguments": ""}})
            text = taking.grow(part["function"].pop("arguments"))
            if final:
                text += taking.rest(input_of(self._calls[index].function.arguments))
            if text or index in calls:
                kind = {"type": "custom"} if "id" in part else {}
                custom = part.pop("function") | {"input": text}
                calls[index] = part | kind | {"custom": custom}
        return fields | {"tool_calls": [calls[at] for at in sorted(calls)]} if calls else fields

    def _take_logprobs(self, delta: Delta) -> list[Entry]:
        if self._top_logprobs is None or not delta.logprobs:
            return []
        entries = chat_logprobs(
            self._tokenizer, delta.token_ids, delta.logprobs, self._top_logprobs
        )
        self._logprobs += entries
        return entries

    def _finish(self, delta: Delta) -> dict[str, Any]:
        assert delta.finish_reason in ("stop", "length")
        whole = self._calls and not self._parser.unfinished
        called = delta.finish_reason == "stop" and whole
        of_call = "function_call" if self._old else "tool_calls"
        self._finish_reason = of_call if called else delta.finish_reason
        self._stop_reason = delta.stop_reason
        part = self._part({})
        part["finish_reason"] = self._finish_reason
        if self._stop_reason is not None:
            part["stop_reason"] = self._stop_reason
        self._experts = routed_experts_fields(delta)
        return part | self._experts

    def result(self) -> ChatChoice:
        """Return the complete choice, after its last delta."""
        assert self._finish_reason, "the choice has not ended"
        reasoning = "".join(self._reasoning) or None
        content = "".join(self._content)
        calls: list[Any] = list(self._calls)
        for at in self._inputs:
            given = calls[at].function
            custom = {"name": given.name, "input": input_of(given.arguments)}
            calls[at] = {"id": calls[at].id, "type": "custom", "custom": custom}
        return ChatChoice(
            index=self._index,
            message=AssistantMessage(
                content=content or (None if reasoning or self._calls else ""),
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=None if self._old else calls or None,
                function_call=self._calls[0].function if self._old and calls else None,
            ),
            logprobs=None
            if self._top_logprobs is None
            else ChatLogprobs.model_validate({"content": self._logprobs}),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            token_ids=self._token_ids if self._keep_token_ids else None,
            **self._experts,
        )


class ChatStream(ChunkStream):
    """The chunks of a chat's choices."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        chat: ConversationTask,
        tokenizer: Tokenizer,
        generations: Sequence[Generation],
    ) -> None:
        super().__init__(body, body.stream_options, generations)
        (generation,) = generations
        self._body = body
        self._chat = chat
        self._tokenizer = tokenizer
        self._generation = generation
        self._choices = [
            ChatChoiceState(body, chat.parser(generation), tokenizer, index, chat.task.attempt)
            for index in range(chat.task.params.n)
        ]
        if body.return_token_ids:
            self.first_fields["prompt_token_ids"] = list(generation.prompt.token_ids)

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self._chat.task.request_id}"

    def parts(self, prompt: int, deltas: Sequence[Delta]) -> list[Part]:
        return self._choices[deltas[0].index].push(deltas)

    def chunk(self, choices: list[Part]) -> Part:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._chat.created,
            "model": self._chat.model,
            "choices": choices,
        }

    def result(self) -> ChatCompletion:
        generation = self._generation
        token_ids = generation.prompt.token_ids
        return ChatCompletion(
            id=self._id,
            created=self._chat.created,
            model=self._chat.model,
            choices=[choice.result() for choice in self._choices],
            usage=self.usage(),
            cache_report=self.report(),
            prompt_token_ids=list(token_ids) if self._body.return_token_ids else None,
            prompt_logprobs=prompt_logprobs_body(
                self._tokenizer, token_ids, generation.prompt_logprobs
            ),
        )
