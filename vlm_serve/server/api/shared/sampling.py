"""Sampling options of request bodies, and constraints on an answer's text and tool calls.

The options are fields of `SamplingParams`. The fields with constraints are `response_format`,
`structured_outputs` and `tool_choice`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pydantic import BaseModel, create_model

from vlm_serve.errors import FieldError, InvalidRequestError
from vlm_serve.preprocess.reading.values import list_of, object_of, text_of, unsupported
from vlm_serve.sampling_params import SamplingOption, SamplingParams, sampling_options
from vlm_serve.server.answers.pieces import ToolForm
from vlm_serve.server.api.shared.fields import AnswerRequest, Items, Table, Whole
from vlm_serve.structured_outputs import StructuredOutputs

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

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_KINDS = tuple(kind.name for kind in fields(StructuredOutputs) if kind.name != "strict")
_SPEAK_OF_PROPERTIES = frozenset(
    ["properties", "patternProperties", "additionalProperties", "required", "propertyNames", "$ref",
     "allOf", "anyOf", "oneOf"]
)  # fmt: skip


def with_sampling(api: str, params: Any = SamplingParams) -> Callable[[type[M]], type[M]]:
    """Return a decorator that adds an API's sampling options to a request model.

    A field that the model declares itself stays as it is.
    """

    def extended(model: type[M]) -> type[M]:
        added: dict[str, Any] = {
            name: (_TYPES[option.kind] | None, None)
            for option in sampling_options(params)
            for name in option.names.get(api, ())
            if name not in model.model_fields
        }
        combined: type[M] = create_model(
            model.__name__, __base__=model, __module__=model.__module__, **added
        )
        combined.__doc__ = model.__doc__
        return combined

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
    if isinstance(body, AnswerRequest) and body.only_prompt:
        others["max_tokens"] = 1
    given = {
        option.name: _read(option, value)
        for option in sampling_options(params)
        if option.name not in others and (value := _given(option, api, body)) is not None
    }
    sampling: SamplingParams = params(**given, **others)
    return sampling


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
    names = {option.name: option.names.get(api, ()) for option in sampling_options(params)}
    return {name: given[-1] for name, given in names.items() if given and name not in given}


def options_elsewhere(api: str, params: Any = SamplingParams) -> dict[str, tuple[Any, ...]]:
    """Return chat's names of the options that an API lacks, with their neutral values."""
    return {
        name: option.neutral
        for option in sampling_options(params)
        for name in option.names.get("chat", ())
        if name not in option.names.get(api, ())
    }


def structured_outputs_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    regex: str | None = None,
) -> StructuredOutputs | None:
    """Return the constraint that one of the fields requests; None if none does.

    Args:
        regex: SGLang's field, the same as `structured_outputs.regex`.

    Raises:
        InvalidRequestError: a field is invalid, or two are set; the error names the field.
    """
    from_format = _from_format(response_format or {"type": "text"})
    given = {name: value for name, value in (structured_outputs or {}).items() if value is not None}
    if regex is not None:
        if given or from_format is not None:
            raise InvalidRequestError(
                "regex excludes response_format and structured_outputs", param="regex"
            )
        try:
            return StructuredOutputs(regex=regex)
        except FieldError as error:
            raise error.under("regex") from None
    if not given:
        return from_format
    if from_format is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs exclude each other", param="structured_outputs"
        )
    unknown = [name for name in given if name not in _KINDS]
    if unknown:
        raise InvalidRequestError(
            f"structured_outputs has an unknown field {unknown[0][:64]!r}; it may have one of "
            + ", ".join(_KINDS),
            param="structured_outputs",
        )
    if not isinstance(given.get("json_object", False), bool):
        raise FieldError("structured_outputs.json_object", "must be true or false")
    return StructuredOutputs(**given)


def _from_format(value: Mapping[str, Any]) -> StructuredOutputs | None:
    if value.get("type") == "json_schema":
        schema = value.get("json_schema")
        return json_schema_form(schema, "response_format.json_schema")
    if value.get("type") == "structural_tag":
        try:
            return StructuredOutputs(structural_tag=dict(value))
        except FieldError as error:
            raise error.under("response_format") from None
    return simple_form(value, "response_format")


def simple_form(value: Mapping[str, Any], place: str) -> StructuredOutputs | None:
    """Return the constraint of a format with only a type.

    Args:
        place: place of the format in the request.

    Raises:
        FieldError: the type is unknown.
    """
    kind = value.get("type")
    if kind not in _FORMATS:
        raise FieldError(f"{place}.type", "must be one of " + ", ".join(_FORMATS))
    if kind == "json_object" and value.get("schema") is not None:  # llama.cpp's form
        return json_schema_form(value, place)
    for name in ("schema", "json_schema"):
        if value.get(name) is not None:
            raise FieldError(f"{place}.{name}", f"has no effect beside {kind}; use json_schema")
    return None if kind == "text" else StructuredOutputs(json_object=True)


def json_schema_form(value: Any, place: str) -> StructuredOutputs:
    """Return the constraint of an object with a `schema` and perhaps `strict`.

    Args:
        place: place of the object in the request.

    Raises:
        FieldError: the schema cannot be enforced.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("schema"), Mapping | bool):
        raise FieldError(f"{place}.schema", "must be an object")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise FieldError(f"{place}.strict", "must be true or false")
    try:
        return StructuredOutputs(json=value["schema"], strict=bool(strict))
    except FieldError as error:
        raise error.under(place) from None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The calls allowed by `tool_choice` and `parallel_tool_calls`.

    Attributes:
        mode: "none", "auto" or "required".
        names: the functions that may be called.
        parallel: several calls are allowed.
    """

    mode: str
    names: tuple[str, ...]
    parallel: bool

    @classmethod
    def of(cls, mode: str | None, names: Sequence[str], parallel: bool | None) -> ToolChoice:
        """Return the choice among all functions.

        Args:
            mode: None means "auto", which without functions is "none".

        Raises:
            InvalidRequestError: the mode is unknown, or requires a call and there are no functions.
        """
        if mode is None:
            mode = "auto"
        if mode not in ("none", "auto", "required"):
            raise InvalidRequestError(
                'tool_choice must be "none", "auto", "required" or a function', param="tool_choice"
            )
        if mode == "required" and not names:
            raise InvalidRequestError(
                "tool_choice requires a call, but there are no tools", param="tool_choice"
            )
        return cls(mode if names else "none", tuple(names), parallel is not False)

    @classmethod
    def function(cls, name: Any, names: Sequence[str]) -> ToolChoice:
        """Return the choice to call one function.

        Raises:
            InvalidRequestError: it is not among the tools.
        """
        if name not in names:
            raise InvalidRequestError(
                f"tool_choice names the function {str(name)[:64]!r}, which is not among the tools "
                "served here",
                param="tool_choice",
            )
        return cls("required", (name,), parallel=False)


def tool_choice_of(choice: Any, names: Sequence[str], parallel: bool | None) -> ToolChoice:
    """Return the choice in the form of chat or of responses.

    The prompt lists all functions even if only some are allowed, so that it stays the same for
    every choice.

    Args:
        choice: a mode, or an object that names a function or the tools allowed.

    Raises:
        InvalidRequestError: see `ToolChoice`, or an object is malformed.
    """
    if not isinstance(choice, dict):
        return ToolChoice.of(choice, names, parallel)
    try:
        if choice.get("type") != "allowed_tools":
            return ToolChoice.function(_function_name(choice, "tool_choice"), names)
        where = "tool_choice.allowed_tools" if "allowed_tools" in choice else "tool_choice"
        allowed = object_of(choice.get("allowed_tools", choice), where)
        tools = enumerate(list_of(allowed.get("tools"), f"{where}.tools"))
        only = [_function_name(tool, f"{where}.tools[{at}]") for at, tool in tools]
        if allowed.get("mode") not in ("auto", "required"):
            raise InvalidRequestError('the mode of allowed tools must be "auto" or "required"')
        if not only:
            raise InvalidRequestError("tool_choice allows no tool")
        for name in only:
            ToolChoice.function(name, names)
        return ToolChoice(allowed["mode"], tuple(dict.fromkeys(only)), parallel is not False)
    except InvalidRequestError as error:
        error.param = "tool_choice"
        raise


def _function_name(tool: Any, where: str) -> str:
    if object_of(tool, where).get("type", "function") not in ("function", "custom"):
        raise unsupported(f"{where}.type", tool.get("type"))
    for kind in ("function", "custom"):
        if kind in tool:
            return text_of(object_of(tool[kind], f"{where}.{kind}"), "name", f"{where}.{kind}")
    return text_of(tool, "name", where)


def with_tools(
    form: StructuredOutputs | None,
    choice: ToolChoice,
    schemas: Mapping[str, Any],
    form_field: str,
    tool_form: ToolForm,
) -> StructuredOutputs | None:
    """Return the constraint of an answer that may or must call tools.

    Args:
        form: the constraint on its text outside of calls.
        schemas: schemas of the parameters, by function name.
        form_field: the request's field with `form`.
        tool_form: syntax of the model's calls.

    Raises:
        InvalidRequestError: a constraint cannot be enforced. The error names the field, unless the
            two constraints hide each other.
    """
    if choice.mode == "none":
        return form
    all_allowed = set(choice.names) == set(schemas)
    if choice.mode == "auto" and form is None and choice.parallel and all_allowed:
        return None
    tags = [_tag(name, schemas[name], tool_form) for name in choice.names]
    calls: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not choice.parallel,
    }
    if choice.mode == "auto" and form is not None:
        calls = {"type": "or", "elements": [_element(form, form_field), calls]}
    elif choice.mode == "auto":  # Text with calls; if only one is allowed, it ends the answer.
        calls = {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": tags,
            "stop_after_first": not choice.parallel,
        }
    try:
        return StructuredOutputs(structural_tag={"type": "structural_tag", "format": calls})
    except FieldError as error:
        raise error.under("tools") from None


def _element(form: StructuredOutputs, field: str) -> dict[str, Any]:
    """Return a constraint as part of a structural tag; its schema names the request's field."""
    kind, source = form.source
    if kind == "json":
        of = {"field": field, "strict": form.strict}
        return {"type": "json_schema", "json_schema": json.loads(source), "of": of}
    if form.choice is not None:
        texts = [{"type": "const_string", "value": text} for text in form.choice]
        return {"type": "or", "elements": texts}
    if kind == "regex":
        return {"type": "regex", "pattern": source}
    if kind == "grammar":
        return {"type": "grammar", "grammar": source}
    tag = form.structural_tag
    if not isinstance(tag, Mapping) or not isinstance(tag.get("format"), Mapping):
        raise InvalidRequestError(
            "a structural tag next to tools must have a format", param="response_format"
        )
    return dict(tag["format"])


def _tag(name: str, schema: Any, tool_form: ToolForm) -> dict[str, Any]:
    """Return the tag of one call, see `CallForm`."""
    if not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise InvalidRequestError(
            f"the function name {name[:64]!r} must consist of letters, digits, '_', '-' and '.' "
            "where tool calls are enforced",
            param="tools",
        )
    parameters = {"type": "object", **(schema or {})}
    if not parameters.keys() & _SPEAK_OF_PROPERTIES:
        parameters["properties"] = {}
    arguments = {
        "type": "json_schema",
        "json_schema": parameters,
        "of": {"function": name},
    }
    if tool_form == "hermes":
        return {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
            "content": arguments,
            "end": "}\n</tool_call>",
        }
    if tool_form == "minicpm5":
        raise InvalidRequestError(
            "calls in the form minicpm5 cannot be enforced, by tool_choice or a format",
            param="tool_choice",
        )
    return {
        "type": "tag",
        "begin": f"<tool_call>\n<function={name}>\n",
        "content": arguments | {"style": "qwen_xml"},
        "end": "\n</function>\n</tool_call>",
    }
