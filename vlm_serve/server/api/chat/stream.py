"""The response to a chat request, complete and as a stream."""

from __future__ import annotations

from typing import Any

from vlm_serve.engine.outputs import Delta
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.server.answers.generation import Generation
from vlm_serve.server.api.answer import AnswerStream, Event
from vlm_serve.server.api.chat.bodies import ChatCompletion
from vlm_serve.server.api.chat.choice import ChatChoiceState
from vlm_serve.server.api.chat.request import ChatCompletionRequest
from vlm_serve.server.api.conversation import ConversationTask
from vlm_serve.server.api.logprobs import prompt_logprobs_body
from vlm_serve.server.api.reports import cache_report_body, cache_report_fields, usage_body


class ChatStream(AnswerStream):
    """The chunks of all choices, then the usage if requested."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        chat: ConversationTask,
        tokenizer: Tokenizer,
        generation: Generation,
    ) -> None:
        self._body = body
        self._chat = chat
        self._tokenizer = tokenizer
        self._generation = generation
        self._choices = [
            ChatChoiceState(
                index=index,
                parser=chat.parser(generation),
                tokenizer=tokenizer,
                top_logprobs=body.top_logprobs or 0 if body.logprobs else None,
                keep_token_ids=bool(body.return_token_ids),
                attempt=chat.task.attempt,
            )
            for index in range(chat.task.params.n)
        ]
        # Fields of the first chunk.
        self._extra: dict[str, Any] = {}
        if body.return_token_ids:
            self._extra["prompt_token_ids"] = list(generation.prompt.token_ids)

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self._chat.task.request_id}"

    def push(self, prompt: int, delta: Delta) -> list[Event]:
        parts = self._choices[delta.index].push(delta)
        chunks = []
        for part in parts:
            chunk, self._extra = self._chunk([part]) | self._extra, {}
            if self._body.stream_option("include_usage"):
                continuous = self._body.stream_option("continuous_usage_stats")
                chunk["usage"] = self._usage() if continuous else None
            chunks.append(chunk)
        ended = not self._generation.unfinished
        if chunks and ended and not self._body.stream_option("include_usage"):
            chunks[-1] |= self._final_fields()
        return chunks

    def end(self) -> list[Event]:
        if not self._body.stream_option("include_usage"):
            return []
        return [self._chunk([]) | {"usage": self._usage()} | self._final_fields()]

    def result(self) -> ChatCompletion:
        body, generation = self._body, self._generation
        prompt = generation.prompt
        return ChatCompletion(
            id=self._id,
            created=self._chat.created,
            model=self._chat.model,
            choices=[choice.result() for choice in self._choices],
            usage=usage_body(generation.usage, prompt),
            cache_report=cache_report_body(generation.cache_report) if body.cache_report else None,
            prompt_token_ids=list(prompt.token_ids) if body.return_token_ids else None,
            prompt_logprobs=prompt_logprobs_body(
                self._tokenizer, prompt.token_ids, generation.prompt_logprobs
            ),
        )

    def _chunk(self, choices: list[dict[str, Any]]) -> Event:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._chat.created,
            "model": self._chat.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        return usage_body(self._generation.usage, self._generation.prompt).model_dump()

    def _final_fields(self) -> dict[str, Any]:
        report = self._generation.cache_report
        if not self._body.cache_report or report is None:
            return {}
        return {"cache_report": cache_report_fields(report)}
