"""What a caller of the pipeline may write: messages or the short form, lists or any iterable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields
from typing import Any, Literal, TypeVar

from vlm_serve.errors import FailedItemsError, InvalidRequestError
from vlm_serve.options.declared import did_you_mean
from vlm_serve.pipeline.media import parts_of, with_plain_media
from vlm_serve.sampling_params import SamplingParams

_T = TypeVar("_T")
OnError = Literal["raise", "return"]
Params = SamplingParams | Iterable[SamplingParams] | None
Results = list[_T | Any]
"""Results of many prompts. With errors="return" exceptions are among them; the type says Any for
those, so that a caller whose errors raise has nothing to check."""
ShortForm = str | tuple[str, Any]
Messages = Sequence[Mapping[str, Any]] | ShortForm
_SAMPLING = frozenset(option.name for option in fields(SamplingParams))


def items_of(given: Iterable[_T], name: str) -> Iterable[_T]:
    """Return the given items.

    Raises InvalidRequestError for a text or a mapping, which a caller gives by mistake.
    """
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{name} must be a list", param=name)
    return given


def count_of(items: Iterable[Any]) -> int | None:
    """Return the number of items; None for a generator, which tells it at its end."""
    return len(items) if isinstance(items, Sized) else None


def params_for(count: int | None, params: Params) -> list[SamplingParams] | SamplingParams:
    """Return the sampling options of each prompt, or those of all.

    Raises InvalidRequestError for anything else, and for a list of another length.
    """
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
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


def listed(ended: Iterable[tuple[int, _T]]) -> list[_T]:
    """Return results that come with their indices in the order of these."""
    results = dict(ended)
    return [results[index] for index in range(len(results))]


def only(ended: Iterable[tuple[int, _T | Exception]]) -> _T:
    """Return the only result; raise it if it is an exception."""
    ((_, result),) = ended
    return returned(result)


def shown(
    ended: Iterable[tuple[int, _T | Exception]], count: int | None
) -> Iterator[tuple[int, _T | Exception]]:
    """Yield results and show on standard error how many of `count` have ended and failed."""
    from tqdm.auto import tqdm

    failed = 0
    with tqdm(ended, total=count, unit="prompt") as bar:
        for index, result in bar:
            if isinstance(result, Exception):
                failed += 1
                bar.set_postfix(failed=failed, refresh=False)
            yield index, result


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


def conversation_of(given: Any) -> Any:
    """Return messages with media as the preprocessor takes them, of messages or the short form.

    Raises InvalidRequestError for anything else that is no list of messages.
    """
    if isinstance(given, str | tuple):
        return messages_of(given)
    if given is not None and not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        raise InvalidRequestError(
            'messages must be a list, such as [{"role": "user", "content": "Hello"}], or the short '
            "form: text, (text, media) or (text, [media, ...])",
            param="messages",
        )
    return with_plain_media(given)


def messages_of(inputs: ShortForm) -> Sequence[Mapping[str, Any]]:
    """Return the conversation of a text, (text, media) or (text, [media, ...]).

    Raises InvalidRequestError for anything else.
    """
    pair: Any = (inputs, []) if isinstance(inputs, str) else inputs
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise InvalidRequestError("the short form is text, (text, media) or (text, [media, ...])")
    text, media = pair
    items = list(media) if isinstance(media, list | tuple) else [media]
    return [{"role": "user", "content": [*parts_of(items), {"type": "text", "text": text}]}]
