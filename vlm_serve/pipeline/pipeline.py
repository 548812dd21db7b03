"""The Python interface: one object answers messages, token ids or (text, media) pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, overload

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.engine.requests.outputs import CacheReport, Delta
from vlm_serve.engine.requests.pooling import ONE_TOKEN, Vector, check_task, embedding_of, scoring
from vlm_serve.errors import ConfigError, EngineClosedError, InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.output import Choice as Choice
from vlm_serve.pipeline.output import Output as Output
from vlm_serve.pipeline.requests import (
    FormOf,
    Messages,
    OnError,
    Params,
    Requests,
    Results,
    ShortForm,
    attempted,
    check_names,
    items_of,
    messages_of,
    params_for,
    returned,
    settled,
)
from vlm_serve.preprocess.identity.keys import NO_ADAPTER
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.text.pooled_prompts import (
    Content,
    contents_of,
    embedding_messages,
    rerank_messages,
)
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.pieces import reasoning_form
from vlm_serve.server.config import ServerConfig

_T = TypeVar("_T")
Chats = Iterable[Messages]
ShortForms = list[ShortForm] | Iterator[ShortForm]
TokenLists = Iterable[Sequence[int]]


class Pipeline:
    """An engine in this process. Threads may share it.

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
        ServerConfig(reasoning_parser=reasoning_parser)  # It checks the value.
        given: object = config
        if not isinstance(given, EngineConfig | None):
            raise ConfigError(f"config must be an EngineConfig, not {type(given).__name__}")
        self._start(Engine.from_checkpoint(str(model), config), reasoning_parser)
        try:
            self._adapter = self.engine.adapters.identity_of(lora)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_engine(cls, engine: Engine, *, reasoning_parser: str = "auto") -> Pipeline:
        """Return a pipeline over a running engine; closing it closes the engine."""
        ServerConfig(reasoning_parser=reasoning_parser)
        pipeline = cls.__new__(cls)
        pipeline._start(engine, reasoning_parser)
        return pipeline

    def _start(self, engine: Engine, reasoning_parser: str) -> None:
        self.engine = engine
        traits = engine.preprocessor.template_traits
        self._requests = Requests(engine, reasoning_form(reasoning_parser, traits))
        self._run = self._requests.run
        self._adapter = NO_ADAPTER
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="vlm-serve-prepare")
        self._closed = False

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine. Running requests end with an error."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.engine.close()

    def _options(
        self, prepare: Callable[..., Prompt], options: Mapping[str, Any], count: int = 1
    ) -> list[dict[str, Any] | Exception]:
        """Return the options of `prepare` for each prompt, with adapters in place of `lora`.

        An unknown adapter in a list is an error of its prompt alone.

        Raises EngineClosedError behind `close`; ModelNotFoundError for an unknown adapter.
        """
        if self._closed:
            raise EngineClosedError("the pipeline is closed: make another one")
        check_names(options, (*signature(prepare).parameters, "lora"))
        kept = dict(options)
        lora = kept.pop("lora", None)
        if not isinstance(lora, list):
            return [self._with_adapter(kept, lora)] * count
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
            messages: OpenAI messages; media parts may hold Python objects, as
                in `__call__`.
            params: sampling options.
            options: those of `prepare`; `lora`: a `LoRA` or a loaded one's name, or a list of them.

        Raises:
            InvalidRequestError or a subclass: bad input.
            EngineError, EngineClosedError: the model's step failed, or the engine has ended.
        """
        return returned(*self._chats([messages], params, options))

    def chat_many(
        self,
        conversations: Chats,
        params: Params = None,
        *,
        errors: OnError = "raise",
        **options: Any,
    ) -> Results[Output]:
        """Answer many conversations with continuous batching; results keep their order.

        Args:
            conversations: as for `chat`; a generator is read to its end first.
            params: for all, or one for each.
            errors: "raise" raises FailedItemsError for conversations that fail, once all others
                are answered; "return" returns their exceptions in place of answers.
            options: as for `chat`.
        """
        return settled(lambda: self._chats(conversations, params, options), errors)

    def probe(self, messages: Messages, **options: Any) -> CacheReport:
        """Report what `chat` would find in the cache for a conversation, without running it.

        Args:
            messages, options: as for `chat`.
        """
        prepare = self.engine.preprocessor.prepare
        return self.engine.probe(prepare(messages, **returned(*self._options(prepare, options))))

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
        results = self._answers(
            prepare, contents_of(contents), ONE_TOKEN, options, convert=messages_of, pooled=True
        )
        return [result if isinstance(result, Exception) else value(result) for result in results]

    def generate(
        self, token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Output:
        """Continue raw token ids, without chat template and media. A thought stays in the text."""
        prepare = self.engine.preprocessor.prepare_tokens
        return returned(*self._answers(prepare, [token_ids], params, options))

    def generate_many(
        self,
        prompts: TokenLists,
        params: Params = None,
        *,
        errors: OnError = "raise",
        **options: Any,
    ) -> Results[Output]:
        """Run `generate` for many prompts at once; results keep their order. `errors` is as for
        `chat_many`."""

        def answers() -> list[Output | Exception]:
            prepare = self.engine.preprocessor.prepare_tokens
            return self._answers(prepare, items_of(prompts, "prompts"), params, options)

        return settled(answers, errors)

    def stream(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Delta]:
        """Yield increments as they arrive: of the answer in `text`, of its thought in `reasoning`.
        Leaving the loop early aborts the request."""
        prepare = self.engine.preprocessor.prepare
        prompt = prepare(messages, **returned(*self._options(prepare, options)))
        (params,) = params_for(1, params)
        yield from self._requests.stream(prompt, params, self._form_of(options))

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
            return settled(lambda: self._chats(inputs, params, {}, convert=messages_of), errors)
        one = [messages_of(inputs)]
        return settled(lambda: [returned(*self._chats(one, params, {}))], errors)[0]

    def _chats(
        self, conversations: Iterable[Any], params: Params, options: Mapping[str, Any], **how: Any
    ) -> list[Output | Exception]:
        return self._answers(
            self.engine.preprocessor.prepare,
            items_of(conversations, "conversations"),
            params,
            options,
            form_of=self._form_of(options),
            **how,
        )

    def _answers(
        self,
        prepare: Callable[..., Prompt],
        inputs: Iterable[Any],
        params: Params,
        options: Mapping[str, Any],
        *,
        convert: Callable[[Any], Any] = lambda given: given,
        **how: Any,
    ) -> list[Output | Exception]:
        """Return the answer to each input, or its exception.

        Args:
            prepare: makes the prompt of a converted input.
            convert: makes what `prepare` takes of an input.
            how: those of `_run`.

        Raises an error of the call as a whole, such as a list of params of another length.
        """

        def prompt_of(given: Any, mine: dict[str, Any] | Exception) -> Prompt:
            return prepare(convert(given), **returned(mine))

        items = list(inputs)
        all_params = params_for(len(items), params)
        prompt_options = self._options(prepare, options, len(items))
        check_task(self.engine.config, pooled=how.get("pooled", False))
        futures = [
            self._pool.submit(prompt_of, *pair) for pair in zip(items, prompt_options, strict=True)
        ]
        try:
            return self._run((attempted(future.result) for future in futures), all_params, **how)
        finally:
            for future in futures:
                future.cancel()

    def _form_of(self, options: Mapping[str, Any]) -> FormOf:
        """Return how answers to conversations with these options are split."""
        continued = bool(options.get("continue_final_message"))
        return partial(self._requests.form_of, continued=continued)
