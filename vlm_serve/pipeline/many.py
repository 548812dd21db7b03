"""Calls with many prompts: their inputs, and what becomes of the prompts that fail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar

from vlm_serve.errors import FailedItemsError, InvalidRequestError
from vlm_serve.options.declared import did_you_mean
from vlm_serve.sampling_params import SamplingParams

_T = TypeVar("_T")
OnError = Literal["raise", "return"]
Params = SamplingParams | Iterable[SamplingParams] | None
Results = list[_T | Any]
"""Results of many prompts. With errors="return" exceptions are among them; the type says Any for
those, so that a caller whose errors raise has nothing to check."""
_SAMPLING = frozenset(each.name for each in fields(SamplingParams))


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
    if not all(isinstance(each, SamplingParams) for each in listed):
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
    failed = {i: each for i, each in enumerate(results) if isinstance(each, Exception)}
    if not failed or errors == "return":
        return list(results)
    outputs = [None if i in failed else each for i, each in enumerate(results)]
    raise FailedItemsError(outputs, failed) from next(iter(failed.values()))
