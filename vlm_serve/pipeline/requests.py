"""Requests of a pipeline: prompts that the engine answers, and their answers collected.

Calls with many prompts go on when some of them fail. The short form of a question is a text with
its media, in place of messages.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.errors import FailedItemsError, InvalidRequestError
from vlm_serve.options.declared import did_you_mean
from vlm_serve.pipeline.output import Collector, Output, TextForm, split_delta
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.answers.pieces import ReasoningParser, thought_behind

FormOf = Callable[[Prompt], TextForm]
"""Returns how the answer to a prompt is split."""


class Requests:
    """Submits prompts to an engine.

    Args:
        engine: answers them.
        reasoning: how the reasoning of answers to conversations is split off.
    """

    def __init__(self, engine: Engine, reasoning: ReasoningParser) -> None:
        self._engine = engine
        self._reasoning = reasoning

    def form_of(self, prompt: Prompt, *, continued: bool = False) -> TextForm:
        """Return how the answer to a conversation's prompt is split.

        Args:
            continued: it continues the last message.
        """
        thought = thought_behind(prompt.text, self._reasoning, continued=continued)
        return TextForm(thought, continued)

    def run(
        self,
        prompts: Iterable[Prompt | Exception],
        params: Sequence[SamplingParams],
        *,
        pooled: bool = False,
        form_of: FormOf = lambda _: TextForm(),
    ) -> list[Output | Exception]:
        """Return the answer to each prompt, or its exception, which may stand in its place.

        Anything but an Exception, such as Ctrl-C, aborts all requests.
        """
        ids: list[str] = []

        def start(prompt: Prompt | Exception, params: SamplingParams) -> Collector:
            prompt, form = self._cut(returned(prompt), params, form_of)
            collector = Collector(prompt, params, form)
            ids.append(self._submit(prompt, params, collector.push, form, pooled=pooled))
            return collector

        try:
            pairs = zip(prompts, params, strict=True)
            waiting = [attempted(start, prompt, sampling) for prompt, sampling in pairs]
            return [
                answer.result() if isinstance(answer, Collector) else answer for answer in waiting
            ]
        except BaseException:
            for request_id in ids:
                self._engine.abort(request_id)
            raise

    def stream(self, prompt: Prompt, params: SamplingParams, form_of: FormOf) -> Iterator[Delta]:
        """Yield the deltas of an answer, split. Leaving the loop early aborts the request."""
        prompt, form = self._cut(prompt, params, form_of)
        parsers = [form.parser() for _ in range(params.n)]
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        request_id = self._submit(prompt, params, deltas.put, form)
        unfinished = params.n
        try:
            while unfinished:
                delta = deltas.get()
                if delta.finish_reason is not None:
                    unfinished -= 1
                if delta.error is not None:
                    raise delta.error
                yield split_delta(delta, parsers[delta.index])
        finally:
            if unfinished:
                self._engine.abort(request_id)

    def _cut(
        self, prompt: Prompt, params: SamplingParams, form_of: FormOf
    ) -> tuple[Prompt, TextForm]:
        """Return the tokens to keep of a prompt, and how its answer is split."""
        kept = prompt.last_tokens(params.kept_prompt_tokens(self._engine.max_model_len))
        return kept, form_of(kept)

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        form: TextForm,
        *,
        pooled: bool = False,
    ) -> str:
        engine, grammar = self._engine, None
        if params.structured_outputs is not None:
            splits = self._reasoning != "none"
            after = engine.before_grammar(prompt, form.thought, splits=splits)
            grammar = engine.grammars.compile(params.structured_outputs, after, prompt.keys.root)
        return engine.submit(
            prompt,
            params,
            on_delta,
            grammar=grammar,
            thought=form.thought,
            pooled=pooled,
            next_turn=form.next_turn(prompt),
        )


_T = TypeVar("_T")
OnError = Literal["raise", "return"]
Params = SamplingParams | Iterable[SamplingParams] | None
Results = list[_T | Any]
"""Results of many prompts. With errors="return" exceptions are among them; the type says Any for
those, so that a caller whose errors raise has nothing to check."""
_SAMPLING = frozenset(option.name for option in fields(SamplingParams))


def items_of(given: Iterable[_T], name: str) -> list[_T]:
    """Return the items of a list or of any other iterable.

    Raises InvalidRequestError for a text or a mapping, which a caller gives by mistake.
    """
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{name} must be a list", param=name)
    return list(given)


def params_for(count: int, params: Params) -> list[SamplingParams]:
    """Return the sampling options of each prompt.

    Raises InvalidRequestError for anything else, and for a list of another length.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    given: Any = params
    listed: list[Any] = [given]
    if isinstance(given, Iterable) and not isinstance(given, str):
        listed = list(given)
    if not all(isinstance(entry, SamplingParams) for entry in listed):
        raise InvalidRequestError("params must be a SamplingParams, or a list with one per prompt")
    if len(listed) != count:
        raise InvalidRequestError(f"{len(listed)} SamplingParams for {count} prompts")
    return listed


def check_names(options: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidRequestError for an option that is not known."""
    for name in options:
        if name in _SAMPLING:
            raise InvalidRequestError(
                f"{name} belongs to params: SamplingParams({name}=...)", param=name
            )
        if name not in known:
            raise InvalidRequestError(
                f"there is no option {name!r}{did_you_mean(name, known)}", param=name
            )


def attempted(function: Callable[..., _T], *arguments: Any) -> _T | Exception:
    """Return a function's result, or its exception."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def returned(result: _T | Exception) -> _T:
    """Return a result; raise it if it is an exception."""
    if isinstance(result, Exception):
        raise result
    return result


def settled(run: Callable[[], Sequence[_T | Exception]], errors: OnError) -> Results[_T]:
    """Run all prompts and return their results, with the exceptions among them.

    Raises FailedItemsError if there are exceptions and they are to be raised; InvalidRequestError
    before the run if `errors` is anything but "raise" and "return".
    """
    if errors not in ("raise", "return"):
        raise InvalidRequestError(
            f'errors must be "raise" or "return", not {errors!r}', param="errors"
        )
    results = run()
    failed = {i: result for i, result in enumerate(results) if isinstance(result, Exception)}
    if not failed or errors == "return":
        return list(results)
    outputs = [None if i in failed else result for i, result in enumerate(results)]
    raise FailedItemsError(outputs, failed) from next(iter(failed.values()))


Messages = Sequence[Mapping[str, Any]]
ShortForm = str | tuple[str, Any]


def messages_of(inputs: ShortForm) -> Messages:
    """Return the conversation of a text, (text, media) or (text, [media, ...]).

    Raises InvalidRequestError for anything else.
    """
    pair: Any = (inputs, []) if isinstance(inputs, str) else inputs
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise InvalidRequestError("the short form is text, (text, media) or (text, [media, ...])")
    text, media = pair
    items = list(media) if isinstance(media, list | tuple) else [media]
    parts = [_media_part(item) for item in items]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


_VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mpg", ".mpeg", ".3gp"),
    *(".flv", ".wmv"),
)


def _media_part(item: Any) -> dict[str, Any]:
    """Return the part for a medium; arrays of four axes, and video names or bytes, are videos."""
    if getattr(item, "ndim", 0) == 4 or _looks_like_video(item):
        return {"type": "video", "video": item}
    return {"type": "image", "image": item}


def _looks_like_video(item: Any) -> bool:
    if isinstance(item, bytes):
        # ISO media ("ftyp", but not its still-image brands), Matroska / WebM, RIFF AVI.
        is_iso = item[4:8] == b"ftyp" and item[8:12] not in (b"avif", b"heic", b"heix", b"mif1")
        return is_iso or item[:4] == b"\x1aE\xdf\xa3" or item[8:12] == b"AVI "
    if isinstance(item, str | Path):
        name = str(item)
        if name.startswith("data:"):
            return name.startswith("data:video/")
        return name.lower().split("?", 1)[0].endswith(_VIDEO_SUFFIXES)
    return False
