"""Refuses JSON schemas in structural tags that xgrammar follows and cannot enforce.

Ignoring a keyword would allow answers that break the schema, and an error is better than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.grammar.keywords import LISTED, NAMED, SINGLE, XGRAMMAR_LACKS
from vlm_serve.grammar.rewriting import MAX_SCHEMA_NODES


def check_tag(tag: Any) -> None:
    """Check the schemas anywhere in a structural tag. Its depth is bounded.

    Raises:
        InvalidRequestError: one uses a keyword that xgrammar lacks. The message names it.
    """
    if isinstance(tag, Mapping):
        of = tag.get("of")
        field = of.get("field") if isinstance(of, Mapping) else None
        for name, value in tag.items():
            if name in ("json_schema", "schema"):
                _check_schema(value, field if isinstance(field, str) else None)
            else:
                check_tag(value)
    elif isinstance(tag, list | tuple):
        for value in tag:
            check_tag(value)


def _check_schema(schema: Any, name: str | None) -> None:
    open_nodes, count = [schema], 0
    while open_nodes:
        node = open_nodes.pop()
        if not isinstance(node, Mapping):
            continue
        count += 1
        if count > MAX_SCHEMA_NODES:
            raise _refuse(name, f"has more than {MAX_SCHEMA_NODES} subschemas")
        for keyword, value in node.items():
            if keyword in XGRAMMAR_LACKS and value is not False:
                raise _refuse(name, f"uses {keyword!r}, which cannot be enforced")
            if keyword == "$ref" and not str(value).startswith("#"):
                raise _refuse(name, "has a $ref to another document; only '#...' is supported")
            if keyword == "allOf" and isinstance(value, list) and len(value) > 1:
                raise _refuse(name, "uses 'allOf' with several schemas, which cannot be enforced")
        open_nodes.extend(_children(node))


def _children(node: Mapping[str, Any]) -> Iterator[Any]:
    for keyword in NAMED:
        if isinstance(node.get(keyword), Mapping):
            yield from node[keyword].values()
    for keyword in LISTED:
        if isinstance(node.get(keyword), list):
            yield from node[keyword]
    for keyword in SINGLE:
        yield node.get(keyword)


def _refuse(name: str | None, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the JSON schema {what}", param=name)
