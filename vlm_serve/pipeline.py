"""The Python interface: one object answers messages, token ids or (text, media) pairs."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from vlm_serve.cache.experts import Rows
from vlm_serve.config import EngineConfig
from vlm_serve.engine.adapters.options import LoRA
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.outputs import CacheReport, Delta, FinishReason, Usage
from vlm_serve.engine.plan import PromptLogprobs
from vlm_serve.engine.pooling import ONE_TOKEN
from vlm_serve.errors import ConfigError, EngineClosedError, InvalidRequestError
from vlm_serve.preprocess.keys import NO_ADAPTER
from vlm_serve.preprocess.pooled_prompts import (
    Content,
    contents_of,
    embedding_messages,
    rerank_messages,
)
from vlm_serve.preprocess.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.short_form import Messages, ShortForm, messages_of
from vlm_serve.vectors import Vector, embedding_of, score_of


@dataclass(frozen=True, slots=True)
class Choice:
    """One of `n` answers to a prompt; fields as in `Output`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None = None
    stop_reason: int | str | None = None
    routed_experts: Rows | None = field(default=None, compare=False)
    routed_experts_gaps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request.

    Attributes:
        text: the answer (of the first choice).
        token_ids: generated token ids, an end-of-sequence token included.
        prompt_token_ids: the prompt with its media placeholders expanded.
        finish_reason: "stop", "length" or "abort".
        logprobs: per generated token a dict token id -> log-probability; None if not requested.
        usage: prompt_tokens, completion_tokens (of all choices), cached_tokens.
        cache_report: what was reused, and why no more.
        choices: all `n` choices, the first one included.
        routed_experts: expert ids `[tokens, layers, top_k]` of prompt and answer, from
            `routed_experts_prompt_start` up to the last token but one; None if not requested.
            uint8 up to 256 experts, else uint16.
        routed_experts_gaps: (first, last + 1) positions of cached tokens without recorded rows;
            their rows are zero.
        prompt_logprobs: of the prompt's tokens from `prompt_logprobs_start` on, except the first
            token; None if not requested.
        vector: of the prompt, from an engine that pools.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    cache_report: CacheReport
    logprobs: list[dict[int, float]] | None = None
    stop_reason: int | str | None = None
    choices: list[Choice] = field(default_factory=list)
    routed_experts: Rows | None = field(default=None, compare=False)
    routed_experts_gaps: tuple[tuple[int, int], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
    vector: Vector | None = field(default=None, compare=False)


class Pipeline:
    """An engine in this process. Threads may share it.

    Args:
        model: a directory, a GGUF file, a hub id, or "demo" / "demo-moe".
        config: engine options.
        lora: adapter of all requests that name none.

    Raises:
        CheckpointError, ConfigError: see `Engine.from_checkpoint`.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        config: EngineConfig | None = None,
        *,
        lora: LoRA | str | None = None,
    ) -> None:
        given: object = config
        if not isinstance(given, EngineConfig | None):
            raise ConfigError(f"config must be an EngineConfig, not {type(given).__name__}")
        self._start(Engine.from_checkpoint(str(model), config))
        try:
            self._adapter = self.engine.adapters.identity_of(lora)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_engine(cls, engine: Engine) -> Pipeline:
        """Return a pipeline over a running engine; closing it closes the engine."""
        pipeline = cls.__new__(cls)
        pipeline._start(engine)
        return pipeline

    def _start(self, engine: Engine) -> None:
        self.engine = engine
        self._adapter = NO_ADAPTER
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="vlm-serve-prepare")
        self._closed = False

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine. Running requests end with an error."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.engine.close()

    def _prepared(self, options: Mapping[str, Any], count: int = 1) -> list[dict[str, Any]]:
        """Return the options of `prepare` for each prompt, with adapters in place of `lora`.

        Raises EngineClosedError behind `close`; ModelNotFoundError for an unknown adapter.
        """
        if self._closed:
            raise EngineClosedError("the pipeline is closed: make another one")
        kept, found = dict(options), []
        lora = kept.pop("lora", None)
        loras = lora if isinstance(lora, list) else [lora] * count
        if len(loras) != count:
            raise InvalidRequestError(f"{len(loras)} adapters for {count} prompts", param="lora")
        for each in loras:
            adapter = self._adapter if each is None else self.engine.adapters.identity_of(each)
            found.append({"adapter": adapter, **kept} if adapter.whole else kept)
        return found

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> Output:
        """Answer one conversation.

        Args:
            messages: OpenAI messages; media parts may hold Python objects, as
                in `__call__`.
            params: sampling options.
            options: those of `prepare`; `lora`: a `LoRA` or a loaded one's name, or a list of them.

        Raises:
            InvalidRequestError or a subclass: bad input.
            EngineError, EngineClosedError: the model's step failed, or the engine has ended.
        """
        return self.chat_many([messages], params, **options)[0]

    def chat_many(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Output]:
        """Answer many conversations with continuous batching; results keep their order."""
        each = _params_for(len(conversations), params)
        own = self._prepared(options, len(conversations))
        futures = [
            self._pool.submit(self.engine.preprocessor.prepare, messages, **mine)
            for messages, mine in zip(conversations, own, strict=True)
        ]
        try:
            return self._run((future.result() for future in futures), each)
        finally:
            for future in futures:
                future.cancel()

    def probe(self, messages: Messages, **options: Any) -> CacheReport:
        """Report what `chat` would find in the cache for a conversation, without running it.

        Args:
            messages, options: as for `chat`.
        """
        (own,) = self._prepared(options)
        return self.engine.probe(self.engine.preprocessor.prepare(messages, **own))

    def embed(
        self, contents: Sequence[Content], instruction: str | None = None, **options: Any
    ) -> list[Vector]:
        """Return the embeddings of texts or lists of parts, each of length 1. The pipeline needs
        the option `task="embed"`.

        Args:
            contents: texts, or parts of a message with media.
            instruction: what the embeddings are for.
            options: as for `chat`.
        """
        chats = [embedding_messages(each, instruction) for each in contents_of(contents)]
        return [embedding_of(each) for each in self._vectors(chats, options)]

    def rerank(
        self,
        query: Content,
        documents: Sequence[Content],
        instruction: str | None = None,
        **options: Any,
    ) -> list[float]:
        """Return the probability that each document meets a query. The pipeline needs the option
        `task="rerank"`; arguments are as for `embed`."""
        chats = [rerank_messages(query, each, instruction) for each in contents_of(documents)]
        return [score_of(each) for each in self._vectors(chats, options)]

    def _vectors(self, chats: Sequence[Messages], options: Mapping[str, Any]) -> list[Vector]:
        prepare, (own,) = self.engine.preprocessor.prepare, self._prepared(options)
        futures = [self._pool.submit(prepare, each, **own) for each in chats]
        prompts = (future.result() for future in futures)
        made = self._run(prompts, [ONE_TOKEN] * len(chats), pooled=True)
        return [each.vector for each in made if each.vector is not None]

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Output:
        """Continue raw token ids, without chat template and media."""
        return self.generate_many([token_ids], params, **options)[0]

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Output]:
        """Run `generate` for many prompts at once; results keep their order."""
        prepare, own = (
            self.engine.preprocessor.prepare_tokens,
            self._prepared(options, len(prompts)),
        )
        return self._run(
            (prepare(ids, **mine) for ids, mine in zip(prompts, own, strict=True)),
            _params_for(len(prompts), params),
        )

    def stream(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Delta]:
        """Yield increments as they arrive. Leaving the loop early aborts the request."""
        (own,) = self._prepared(options)
        prompt = self.engine.preprocessor.prepare(messages, **own)
        (params,) = _params_for(1, params)
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        request_id = self.engine.submit(prompt, params, deltas.put)
        unfinished = params.n
        try:
            while unfinished:
                delta = deltas.get()
                if delta.finish_reason is not None:
                    unfinished -= 1
                if delta.error is not None:
                    raise delta.error
                yield delta
        finally:
            if unfinished:
                self.engine.abort(request_id)

    @overload
    def __call__(self, inputs: ShortForm, params: SamplingParams | None = None) -> Output: ...
    @overload
    def __call__(
        self, inputs: list[ShortForm], params: SamplingParams | None = None
    ) -> list[Output]: ...
    def __call__(
        self, inputs: ShortForm | list[ShortForm], params: SamplingParams | None = None
    ) -> Output | list[Output]:
        """Answer the short form: a text, (text, media) or (text, [media, ...]), or a list of them.

        Media (PIL images, uint8 frames `[T, H, W, 3]`, paths, URLs, bytes) come before the text.
        """
        if isinstance(inputs, list):
            return self.chat_many([messages_of(each) for each in inputs], params)
        return self.chat(messages_of(inputs), params)

    def _run(
        self, prompts: Iterator[Prompt], params: Sequence[SamplingParams], *, pooled: bool = False
    ) -> list[Output]:
        collectors: list[_Collector] = []
        ids: list[str] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                prompt = prompt.last_tokens(each.kept_prompt_tokens(self.engine.max_model_len))
                collectors.append(_Collector(prompt, each))
                ids.append(self.engine.submit(prompt, each, collectors[-1].push, pooled=pooled))
            return [collector.result() for collector in collectors]
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise


class _Collector:
    """Collects the deltas of one request into an Output."""

    def __init__(self, prompt: Prompt, params: SamplingParams) -> None:
        self._prompt = prompt
        self._params = params
        self._parts: list[list[Delta]] = [[] for _ in range(params.n)]
        self._unfinished = params.n
        self._last: queue.SimpleQueue[Delta] = queue.SimpleQueue()

    def push(self, delta: Delta) -> None:
        """Take a delta on the engine's thread.

        Only the last one wakes the waiting thread: a wake-up per step would take time from steps.
        """
        self._parts[delta.index].append(delta)
        self._unfinished -= delta.finish_reason is not None
        if delta.error is not None or not self._unfinished:
            self._last.put(delta)

    def result(self) -> Output:
        """Wait for the request to end. Raises its error, if it has one."""
        last = self._last.get()
        if last.error is not None:
            raise last.error
        choices = [self._choice(deltas) for deltas in self._parts]
        first = choices[0]
        assert last.cache_report is not None
        return Output(
            text=first.text,
            token_ids=first.token_ids,
            prompt_token_ids=list(self._prompt.token_ids),
            finish_reason=first.finish_reason,
            usage=last.usage,
            cache_report=last.cache_report,
            logprobs=first.logprobs,
            stop_reason=first.stop_reason,
            choices=choices,
            routed_experts=first.routed_experts,
            routed_experts_gaps=first.routed_experts_gaps,
            prompt_logprobs=self._parts[0][0].prompt_logprobs,
            vector=last.vector,
        )

    def _choice(self, deltas: list[Delta]) -> Choice:
        last = deltas[-1]
        assert last.finish_reason is not None
        wants_logprobs = self._params.logprobs is not None
        return Choice(
            text="".join(delta.text for delta in deltas),
            token_ids=[token for delta in deltas for token in delta.token_ids],
            finish_reason=last.finish_reason,
            logprobs=[d for delta in deltas for d in delta.logprobs] if wants_logprobs else None,
            stop_reason=last.stop_reason,
            routed_experts=last.routed_experts,
            routed_experts_gaps=last.routed_experts_gaps,
        )


def _params_for(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    given: object = params
    if not isinstance(given, Sequence) or not all(isinstance(x, SamplingParams) for x in given):
        raise InvalidRequestError("params must be a SamplingParams, or a list with one per prompt")
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} SamplingParams for {count} prompts")
    return list(params)
