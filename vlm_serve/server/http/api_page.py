"""The page at /docs: all routes of the OpenAPI document, readable without script and network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border-top: 1px solid #8884; padding: .4rem 0 }
summary { cursor: pointer; overflow-wrap: anywhere }
code { font-family: ui-monospace, monospace }
table { border-collapse: collapse; margin: .5rem 0 }
th, td { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0 }
"""
_METHODS = ("get", "post", "put", "patch", "delete")


def render(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    rows = "".join(_operations(document))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f'<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>{rows}</html>'
    )


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    schemas = document.get("components", {}).get("schemas", {})
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                yield _operation(f"{method.upper()} {path}", item[method], schemas)


def _operation(head: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    summary = escape(operation.get("summary", ""))
    described = escape(operation.get("description", ""))
    rows = [
        (each["name"], f"in the {each['in']}", each.get("description", ""))
        for each in operation.get("parameters", ())
    ]
    content = operation.get("requestBody", {}).get("content", {})
    body = _resolved(content.get("application/json", {}).get("schema", {}), schemas)
    required = body.get("required", ())
    for name, field in body.get("properties", {}).items():
        kind = _kind(field) + ", required" * (name in required)
        if field.get("default") not in (None, [], {}):
            kind += f", default {field['default']}"
        rows.append((name, kind, field.get("description", "")))
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{escape(text)}"
        for name, kind, text in rows
    )
    table = f"<table><tr><th>field<th>type<th>meaning{cells}</table>" if rows else ""
    return (
        f"<details><summary><code>{escape(head)}</code> {summary}</summary>"
        f"<p>{described}</p>{table}</details>"
    )


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    resolved: Mapping[str, Any] = schemas.get(name, schema)
    return resolved


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type of a field in words."""
    choices = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if choices:
        return " or ".join(dict.fromkeys(map(_kind, choices)))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        return " or ".join(map(str, schema.get("enum", [schema.get("const")])))
    kind = schema.get("type", "any")
    return (
        f"list of {_kind(schema['items'])}" if kind == "array" and "items" in schema else str(kind)
    )
