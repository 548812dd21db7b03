"""Sampling options of request bodies: fields and mapping from `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, create_model

from vlm_serve.errors import InvalidRequestError
from vlm_serve.sampling_params import SamplingOption, SamplingParams, sampling_options
from vlm_serve.server.api.fields import Items, Table, Whole
from vlm_serve.server.api.structured import structured_outputs_of

M = TypeVar("M", bound=BaseModel)

_TYPES: dict[str, Any] = {
    "int": Whole,
    "float": float,
    "bool": bool,
    "str": str,
    "tuple[str, ...]": str | Items[str],
    "tuple[int, ...]": Items[Whole],
    "Mapping[int, float]": Table[float],
    "StructuredOutputs": Table[Any],
}
"""Types in JSON by the annotation of the field, without its `| None`."""


def with_sampling(api: str, params: Any = SamplingParams) -> Callable[[type[M]], type[M]]:
    """Return a decorator that adds an API's sampling options to a request model.

    A field that the model declares itself stays as it is.
    """

    def extended(model: type[M]) -> type[M]:
        added: dict[str, Any] = {
            name: (_TYPES[each.kind] | None, None)
            for each in sampling_options(params)
            for name in each.names.get(api, ())
            if name not in model.model_fields
        }
        made: type[M] = create_model(
            model.__name__, __base__=model, __module__=model.__module__, **added
        )
        made.__doc__ = model.__doc__
        return made

    return extended


def sampling_of(
    api: str, body: BaseModel, params: Any = SamplingParams, **others: Any
) -> SamplingParams:
    """Return the sampling parameters of a validated body.

    Args:
        others: options that the body expresses in another way; they take precedence.

    Raises:
        InvalidRequestError: an option is out of range; the error names `SamplingParams`' field.
    """
    found = {
        each.name: _read(each, value)
        for each in sampling_options(params)
        if each.name not in others and (value := _given(each, api, body)) is not None
    }
    made: SamplingParams = params(**found, **others)
    return made


def _given(option: SamplingOption, api: str, body: BaseModel) -> Any:
    values = (getattr(body, name, None) for name in option.names.get(api, ()))
    return next((value for value in values if value is not None), None)


def _read(option: SamplingOption, value: Any) -> Any:
    if option.name == "logit_bias":
        return _token_biases(value)
    return structured_outputs_of(None, value) if option.kind == "StructuredOutputs" else value


def _token_biases(bias: Mapping[str, float]) -> dict[int, float]:
    """Return `logit_bias` by token id; in JSON, all keys are strings."""
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidRequestError(
                f"logit_bias: {token[:32]!r} is not a token id", param="logit_bias"
            )
    return {int(token): value for token, value in bias.items()}


def sampling_names(api: str, params: Any = SamplingParams) -> dict[str, str]:
    """Return an API's names of the options that it names differently."""
    names = {each.name: each.names.get(api, ()) for each in sampling_options(params)}
    return {name: given[-1] for name, given in names.items() if given and name not in given}


def options_elsewhere(api: str, params: Any = SamplingParams) -> dict[str, tuple[Any, ...]]:
    """Return chat's names of the options that an API lacks, with their neutral values."""
    return {
        name: each.neutral
        for each in sampling_options(params)
        for name in each.names.get("chat", ())
        if name not in each.names.get(api, ())
    }
