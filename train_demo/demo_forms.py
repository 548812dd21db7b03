"""Forms of answers that programs read: JSON and tool calls, and how prompts describe them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from demo_fields import Field, Schema, of
from demo_text import capital_name, identifier, prose

Pieces = tuple[tuple[str, ...], frozenset[int]]
"""Parts of an answer, and which of them are given, not learned."""

TOOLS_HEAD = (
    "# Tools\n\nThese functions can be called, one JSON signature a line:\n<tools>\n{tools}\n"
    "</tools>\n\nTo call one, end the answer with a block of exactly this form:\n\n"
    "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n"
    "</tool_call>\n\nA value may span several lines. Give every required parameter. Text may come "
    "before a call, never after it. Several calls are several such blocks. Without a fitting "
    "function, answer directly."
)
"""The chat template's text about tools."""


def json_text(fields: Sequence[Field]) -> str:
    return json.dumps({field.name: field.value for field in fields})


def json_pieces(fields: Sequence[Field]) -> Pieces:
    """Return an object whose names are given, as a grammar does."""
    parts: list[str] = []
    for number, field in enumerate(fields):
        parts.append(("{" if number == 0 else " ") + json.dumps(field.name) + ":")
        end = "}" if number + 1 == len(fields) else ","
        parts.append(f" {json.dumps(field.value)}{end}")
    return tuple(parts), frozenset(range(0, len(parts), 2))


def value_text(value: Any) -> str:
    """Return a value as an argument of a call has it."""
    return value if isinstance(value, str) else json.dumps(value)


def call_text(name: str, fields: Sequence[Field]) -> str:
    """Return a tool call in the template's form."""
    return "".join(call_pieces(name, fields)[0])


def call_pieces(name: str, fields: Sequence[Field]) -> Pieces:
    """Return a call whose names are given, as a grammar does."""
    parts, given = [f"<tool_call>\n<function={name}>\n"], {0}
    for field in fields:
        given.add(len(parts))
        parts.append(f"<parameter={field.name}>\n")
        parts.append(f"{value_text(field.value)}\n</parameter>\n")
    parts.append("</function>\n</tool_call>")
    return tuple(parts), frozenset(given)


def signature(rng: random.Random, name: str, about: str, fields: Sequence[Field]) -> Schema:
    """Return a tool as clients send it: with or without titles, descriptions and such."""
    properties: dict[str, Schema] = {}
    style = rng.random()
    for field in fields:
        schema = dict(field.schema)
        if style < 0.4:
            schema["description"] = prose(rng, rng.randint(2, 8))
        elif style < 0.7:
            schema = {"title": field.name.replace("_", " ").title(), **schema}
        properties[field.name] = schema
    parameters = of(properties)
    shape = rng.random()
    if shape < 0.2:
        parameters["title"] = name
    elif shape < 0.4:
        parameters["additionalProperties"] = False
    elif shape < 0.5:
        parameters = {key: parameters[key] for key in ("properties", "required", "type")}
    function: Schema = {"name": name, "description": about, "parameters": parameters}
    if rng.random() < 0.2:
        function["strict"] = True
    return {"type": "function", "function": function}


def with_tools(tools: Sequence[Schema], system: str) -> str:
    """Return the system message that the template makes of tools and a system message."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return TOOLS_HEAD.replace("{tools}", lines) + (f"\n\n{system}" if system else "")


def form_schema(rng: random.Random, fields: Sequence[Field]) -> Schema:
    """Return the schema of fields as pydantic writes it."""
    properties: dict[str, Schema] = {}
    described = rng.random() < 0.25
    for field in fields:
        schema = {"title": field.name.replace("_", " ").title(), **field.schema}
        properties[field.name] = schema
        if described:
            schema["description"] = prose(rng, rng.randint(2, 6))
    return {
        "properties": properties,
        "required": list(properties),
        "title": capital_name(rng) if rng.random() < 0.5 else identifier(rng, "train").title(),
        "type": "object",
    }


SCHEMA_PROMPTS = (
    "As a genius expert, your task is to understand the content and provide the parsed objects in "
    "json that match the following json_schema:\n\n{}\n\n"
    "Make sure to return an instance of the JSON, not the schema itself",
    "Always respond with a JSON object that's compatible with this schema:\n\n{}\n\n"
    "Don't include any text or Markdown fencing before or after.",
    "Answer in JSON that follows this schema: {}",
    "The output should be formatted as a JSON instance that conforms to the JSON schema below.\n\n"
    "Here is the output schema:\n```\n{}\n```",
    "Respond only with JSON. Schema:\n{}",
)


def schema_prompt(rng: random.Random, schema: Schema) -> str:
    """Return words that ask for JSON of a schema."""
    indent = rng.choice((None, None, 2))
    return rng.choice(SCHEMA_PROMPTS).replace("{}", json.dumps(schema, indent=indent))


FENCE_PROMPT = "Return the correct JSON response within a ```json codeblock. not the JSON_SCHEMA"


def fenced(text: str) -> str:
    return f"```json\n{text}\n```"
