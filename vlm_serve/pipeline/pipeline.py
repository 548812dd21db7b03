"""The Python interface: one object answers messages, token ids or (text, media) pairs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, overload

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.engine.requests.outputs import CacheReport, Delta
from vlm_serve.engine.requests.pooling import (
    ONE_TOKEN,
    Vector,
    check_task,
    embedding_of,
    scoring,
    telling,
)
from vlm_serve.errors import ConfigError, EngineClosedError, InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import explains_keywords
from vlm_serve.pipeline.inputs import (
    Messages,
    OnError,
    Params,
    Results,
    ShortForm,
    attempted,
    check_names,
    conversation_of,
    count_of,
    items_of,
    listed,
    messages_of,
    only,
    params_for,
    returned,
    settled,
    shown,
)
from vlm_serve.pipeline.output import Choice as Choice
from vlm_serve.pipeline.output import Output as Output
from vlm_serve.pipeline.output import TextForm
from vlm_serve.pipeline.requests import FormOf, Job, Requests, whole
from vlm_serve.preprocess.decisions.asking import Answer as Answer
from vlm_serve.preprocess.decisions.asking import Asked, ask, check_mass
from vlm_serve.preprocess.identity.keys import NO_ADAPTER, AdapterIdentity
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.reading.conversation import schemas_of
from vlm_serve.preprocess.reading.decisions import read_questions, read_system_one
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.preprocess.text.pooled_prompts import (
    Content,
    contents_of,
    embedding_messages,
    rerank_messages,
)
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.pieces import reasoning_form
from vlm_serve.server.config import ServerConfig

_T = TypeVar("_T")
_ABOUT = ("tools", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs")
"""Options of `prepare` that belong to a conversation."""
Chats = Iterable[Messages]
ShortForms = list[ShortForm] | Iterator[ShortForm]
Text = str | Sequence[int]
"""A text without chat template, or its token ids."""
Ended = Iterator[tuple[int, Output | Exception]]
"""Results in the order in which they end, with the index of their prompt."""


@explains_keywords
class Pipeline:
    """An engine in this process. Threads may share it; a forked child may not.

    Args:
        model: a directory, a GGUF file, a hub id, or "demo" / "demo-moe".
        config: engine options.
        lora: adapter of all requests that name none.
        reasoning_parser: how thoughts are split off, as the server's option of that name.

    Raises:
        CheckpointError, ConfigError: see `Engine.from_checkpoint`.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        config: EngineConfig | None = None,
        *,
        lora: LoRA | str | None = None,
        reasoning_parser: str = "auto",
    ) -> None:
        reasoning_parser = ServerConfig(reasoning_parser=reasoning_parser).reasoning_parser
        given: object = config
        if not isinstance(given, EngineConfig | None):
            raise ConfigError(f"config must be an EngineConfig, not {type(given).__name__}")
        self._start(Engine.from_checkpoint(str(model), config), reasoning_parser)
        self._name = str(model)
        try:
            self._adapter = self.engine.adapters.identity_of(lora)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_engine(cls, engine: Engine, *, reasoning_parser: str = "auto") -> Pipeline:
        """Return a pipeline over a running engine; closing it closes the engine."""
        reasoning_parser = ServerConfig(reasoning_parser=reasoning_parser).reasoning_parser
        pipeline = cls.__new__(cls)
        pipeline._start(engine, reasoning_parser)
        return pipeline

    def _start(self, engine: Engine, reasoning_parser: str) -> None:
        self.engine = engine
        self._name = "a running engine"
        self._traits = engine.preprocessor.template_traits
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="vlm-serve-prepare")
        reasoning = reasoning_form(reasoning_parser, self._traits)
        self._requests = Requests(engine, reasoning, self._pool)
        self._adapter = NO_ADAPTER
        self._closed = False
        self._process = os.getpid()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" * self._closed
        return f"Pipeline({self._name!r}, max_model_len={self.engine.max_model_len}{closed})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Pipeline cannot be pickled: make one in each process")

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with `encode` of a text and `decode` of token ids."""
        return self.engine.preprocessor.tokenizer

    def close(self) -> None:
        """Stop the engine. Running requests end with an error. A forked child stops nothing."""
        self._closed = True
        if self._process != os.getpid():
            return
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.engine.close()

    def _options(
        self, prepare: Callable[..., Prompt], options: Mapping[str, Any], count: int | None = 1
    ) -> list[dict[str, Any] | Exception] | dict[str, Any]:
        """Return the options of `prepare` for all prompts, with the adapter in place of `lora`, or
        for each of them.

        An unknown adapter in a list is an error of its prompt alone.

        Raises EngineClosedError behind `close` and in a forked child; ModelNotFoundError for an
        unknown adapter.
        """
        if self._process != os.getpid():
            raise EngineClosedError(
                "the pipeline belongs to the process that made it, whose threads a fork does not "
                "have: make one in this process"
            )
        if self._closed:
            raise EngineClosedError("the pipeline is closed: make another one")
        check_names(options, (*signature(prepare).parameters, "lora"))
        kept = dict(options)
        lora = kept.pop("lora", None)
        if not isinstance(lora, list):
            return self._with_adapter(kept, lora)
        if len(lora) != count:
            raise InvalidRequestError(f"{len(lora)} adapters for {count} prompts", param="lora")
        return [attempted(self._with_adapter, kept, adapter) for adapter in lora]

    def _with_adapter(self, options: dict[str, Any], lora: LoRA | str | None) -> dict[str, Any]:
        adapter = self._adapter if lora is None else self.engine.adapters.identity_of(lora)
        return {"adapter": adapter, **options} if adapter.whole else options

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> Output:
        """Answer one conversation.

        Args:
            messages: OpenAI messages, whose media parts may hold Python objects, as in `__call__`;
                or the short form that it takes.
            params: sampling options.
            options: those of `prepare`; `lora`: a `LoRA` or a loaded one's name, or a list of them.

        Raises:
            InvalidRequestError or a subclass: bad input.
            EngineError, EngineClosedError: the model's step failed, or the engine has ended.
        """
        return only(self._chats([messages], params, options))

    @overload
    def chat_many(
        self,
        conversations: Iterable[Messages],
        params: Params = None,
        *,
        errors: OnError = "raise",
        as_completed: Literal[False] = False,
        progress: bool = False,
        **options: Any,
    ) -> Results[Output]: ...
    @overload
    def chat_many(
        self,
        conversations: Iterable[Messages],
        params: Params = None,
        *,
        as_completed: Literal[True],
        progress: bool = False,
        **options: Any,
    ) -> Ended: ...
    def chat_many(
        self,
        conversations: Iterable[Messages],
        params: Params = None,
        *,
        errors: OnError = "raise",
        as_completed: bool = False,
        progress: bool = False,
        **options: Any,
    ) -> Results[Output] | Ended:
        """Answer many conversations with continuous batching; results keep their order.

        Args:
            conversations: as for `chat`. They are read while others are answered, a bounded number
                ahead.
            params: for all, or one for each.
            errors: "raise" raises FailedItemsError for conversations that fail, once all others
                are answered; "return" returns their exceptions in place of answers.
            as_completed: yield (index, answer or its exception) as each ends, instead of a list.
                Nothing is kept of those that were yielded. Leaving the loop aborts the others.
            progress: show a bar on standard error.
            options: as for `chat`.
        """
        ended = self._chats(conversations, params, options, progress=progress)
        return ended if as_completed else settled(lambda: listed(ended), errors)

    def probe(self, messages: Messages, **options: Any) -> CacheReport:
        """Report what `chat` would find in the cache for a conversation, without running it.

        Args:
            messages, options: as for `chat`.
        """
        prepare, pooled = self.engine.preprocessor.prepare, self.engine.config.task != "generate"
        how = partial(self._jobs, prepare, [messages], None, options, convert=conversation_of)
        (job,) = how(pooled=pooled)
        return self.engine.probe(returned(job).prepare())

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters and gauges, as `/v1/cache/stats` does.

        In `stats["cache"]`, `hit_tokens` over `query_tokens` is the hit rate since the start.
        `stats["usage"]` says what blocks and rows hold, `stats["held_bytes"]` what keeps memory.
        """
        return self.engine.stats()

    def embed(
        self,
        contents: Iterable[Content],
        instruction: str | None = None,
        *,
        prompt_name: str | None = None,
        errors: OnError = "raise",
        **options: Any,
    ) -> Results[Vector]:
        """Return the embeddings of texts or lists of parts, each of length 1. The pipeline needs
        the option `task="embed"`.

        Args:
            contents: texts, or parts of a message with media.
            instruction: what the embeddings are for.
            prompt_name: of the checkpoint's prompts, such as "query".
            errors: as for `chat_many`.
            options: as for `chat`.
        """
        known = self.engine.preprocessor
        asked: Any = {"sentences": known.sentences, "name": prompt_name}
        form = partial(embedding_messages, instruction=instruction, **asked)
        value = partial(embedding_of, unit=known.normalised)
        return settled(lambda: self._vectors(contents, form, value, options), errors)

    def rerank(
        self,
        query: Content,
        documents: Iterable[Content],
        instruction: str | None = None,
        *,
        errors: OnError = "raise",
        **options: Any,
    ) -> Results[float]:
        """Return the probability that each document meets a query. The pipeline needs the option
        `task="rerank"`; arguments are as for `embed`."""
        plain = not self.engine.preprocessor.takes_media
        form = partial(rerank_messages, query, instruction=instruction, plain=plain)
        score = scoring(self.engine.spec)
        return settled(lambda: self._vectors(documents, form, score, options), errors)

    def _vectors(
        self,
        contents: Iterable[Content],
        messages_of: Callable[[Any], Messages],
        value_of: Callable[[Vector], _T],
        options: Mapping[str, Any],
    ) -> list[_T | Exception]:
        def value(output: Output) -> _T:
            assert output.vector is not None
            return value_of(output.vector)

        prepare = self.engine.preprocessor.prepare
        given, params = contents_of(contents), ONE_TOKEN
        ended = self._answers(prepare, given, params, options, convert=messages_of, pooled=True)
        results = listed(ended)
        return [result if isinstance(result, Exception) else value(result) for result in results]

    def decide(
        self,
        messages: Messages,
        questions: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        refuse_below: float = 0.0,
        errors: OnError = "raise",
        **options: Any,
    ) -> Results[Answer]:
        """Answer typed questions about one conversation, which is computed once for all of them.

        Args:
            messages: as for `chat`.
            questions: those of `/v1/decisions`, `{"type": "predicate", "instructions": "..."}` and
                so on; or by their names those of `/v1/systemone`.
            refuse_below: an answer is `refused` if the labels have less probability together.
            errors: as for `chat_many`.
            options: as for `chat`, without those of the answer's beginning.
        """
        check_mass(refuse_below)
        named = isinstance(questions, Mapping)
        given = read_system_one(questions, {}) if named else read_questions(questions, [])
        body = {name: options.pop(name) for name in _ABOUT if name in options}
        about = read_conversation("chat", {"messages": conversation_of(messages), **body})
        asked = ask(about, given, self.tokenizer, self._traits)
        prompts = [prompt for each in asked for prompt, _ in each.prompts]
        params = [telling(tokens) for each in asked for _, tokens in each.prompts]
        prepare = self.engine.preprocessor.prepare

        def answers() -> list[Answer | Exception]:
            outputs = iter(listed(self._answers(prepare, prompts, params, options)))
            mine = ([next(outputs) for _ in each.prompts] for each in asked)
            return [_decided(*pair, refuse_below) for pair in zip(asked, mine, strict=True)]

        return settled(answers, errors)

    def generate(
        self, prompt: Text, params: SamplingParams | None = None, **options: Any
    ) -> Output:
        """Continue a text or raw token ids, without chat template and media. A thought stays in the
        text."""
        return only(self._answers(self._continuation, [prompt], params, options))

    def generate_many(
        self,
        prompts: Iterable[Text],
        params: Params = None,
        *,
        errors: OnError = "raise",
        progress: bool = False,
        **options: Any,
    ) -> Results[Output]:
        """Run `generate` for many prompts at once; arguments are as for `chat_many`."""
        given = items_of(prompts, "prompts")
        ended = self._answers(self._continuation, given, params, options, progress=progress)
        return settled(lambda: listed(ended), errors)

    def stream(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Delta]:
        """Yield increments as they arrive: of the answer in `text`, of its thought in `reasoning`.
        Tool calls stay in the text. Leaving the loop early aborts the request."""
        yield from self._requests.stream(self._chat_job(messages, params, options))

    async def achat(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> Output:
        """Do as `chat` does, without blocking the event loop. Cancelling aborts the request."""
        return await self._requests.answer_async(self._chat_job(messages, params, options))

    async def astream(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """Do as `stream` does, without blocking the event loop."""
        async for delta in self._requests.stream_async(self._chat_job(messages, params, options)):
            yield delta

    @overload
    def __call__(self, inputs: ShortForm, params: SamplingParams | None = None) -> Output: ...
    @overload
    def __call__(
        self, inputs: ShortForms, params: Params = None, *, errors: OnError = "raise"
    ) -> Results[Output]: ...
    def __call__(
        self,
        inputs: ShortForm | ShortForms,
        params: Params = None,
        *,
        errors: OnError = "raise",
    ) -> Output | Results[Output]:
        """Answer the short form: a text, (text, media) or (text, [media, ...]), or a list of them.

        Media (PIL images, uint8 frames `[T, H, W, 3]`, paths, URLs, bytes) come before the text.
        `errors` is as for `chat_many`.
        """
        if isinstance(inputs, Iterable) and not isinstance(inputs, str | tuple | bytes | Mapping):
            ended = self._chats(inputs, params, {}, convert=messages_of)
            return settled(lambda: listed(ended), errors)
        return only(self._chats([messages_of(inputs)], params, {}))

    def _chats(
        self, conversations: Iterable[Any], params: Params, options: Mapping[str, Any], **how: Any
    ) -> Ended:
        given = items_of(conversations, "conversations")
        how = {"convert": conversation_of, "form_of": self._form_of(options), **how}
        return self._answers(self.engine.preprocessor.prepare, given, params, options, **how)

    def _chat_job(
        self, messages: Messages, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> Job:
        prepare, form_of = self.engine.preprocessor.prepare, self._form_of(options)
        (job,) = self._jobs(
            prepare, [messages], params, options, convert=conversation_of, form_of=form_of
        )
        return returned(job)

    def _continuation(
        self, prompt: Text, *, cache_salt: str = "", adapter: AdapterIdentity = NO_ADAPTER
    ) -> Prompt:
        """Return the prompt of a text or of token ids."""
        preprocessor = self.engine.preprocessor
        if isinstance(prompt, str):
            prompt = preprocessor.encode(prompt, cache_salt=cache_salt)
        return preprocessor.prepare_tokens(prompt, cache_salt=cache_salt, adapter=adapter)

    def _jobs(
        self,
        prepare: Callable[..., Prompt],
        inputs: Iterable[Any],
        params: Params,
        options: Mapping[str, Any],
        *,
        convert: Callable[[Any], Any] = lambda given: given,
        form_of: FormOf = whole,
        pooled: bool = False,
    ) -> Iterable[Job | Exception]:
        """Return the job of each input, or its exception.

        Args:
            prepare: makes the prompt of a converted input.
            convert: makes what `prepare` takes of an input.

        Raises an error of the call as a whole, such as a list of params of another length.
        """
        each = isinstance(options.get("lora"), list)
        each |= not isinstance(params, SamplingParams | None)
        if each and count_of(inputs) is None:
            inputs = list(inputs)
        count = count_of(inputs)
        all_params, all_options = params_for(count, params), self._options(prepare, options, count)
        check_task(self.engine.config, pooled=pooled)

        def job(index: int, given: Any) -> Job:
            mine = all_options[index] if isinstance(all_options, list) else all_options
            sampling = all_params[index] if isinstance(all_params, list) else all_params
            ready = partial(_prepared, prepare, convert, given, returned(mine))
            return Job(ready, sampling, form_of, pooled)

        return (attempted(job, index, given) for index, given in enumerate(inputs))

    def _answers(
        self,
        prepare: Callable[..., Prompt],
        inputs: Iterable[Any],
        params: Params,
        options: Mapping[str, Any],
        *,
        progress: bool = False,
        **how: Any,
    ) -> Ended:
        """Answer inputs; arguments are those of `_jobs`."""
        ended = self._requests.answers(self._jobs(prepare, inputs, params, options, **how))
        return shown(ended, count_of(inputs)) if progress else ended

    def _form_of(self, options: Mapping[str, Any]) -> FormOf:
        """Return how answers to conversations with these options are split."""
        continued = bool(options.get("continue_final_message"))

        def form_of(prompt: Prompt) -> TextForm:
            schemas = schemas_of(options.get("tools") or ())
            tools = {name: schema or {} for name, schema in schemas.items()} or None
            form = TextForm(None, continued, tools, self._traits.tool_form)
            return self._requests.form_of(prompt, form)

        return form_of


def _decided(
    asked: Asked, outputs: Sequence[Output | Exception], refuse_below: float
) -> Answer | Exception:
    failed = next((each for each in outputs if isinstance(each, Exception)), None)
    if failed is not None:
        return failed
    told = [row for each in map(returned, outputs) for row in each.logprobs or ()]
    return asked.answer(told, refuse_below)


def _prepared(
    prepare: Callable[..., Prompt],
    convert: Callable[[Any], Any],
    given: Any,
    options: Mapping[str, Any],
) -> Prompt:
    return prepare(convert(given), **options)
