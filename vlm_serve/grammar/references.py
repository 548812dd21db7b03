"""References inside a JSON schema, and definitions without an end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from vlm_serve.errors import InvalidRequestError

MISSING = object()
_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")


class Document:
    """A schema whose subschemas refer to each other.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self._named: dict[str, Any] = {}
        open_nodes = [root]
        while open_nodes:
            node = open_nodes.pop()
            if isinstance(node, Mapping):
                for keyword, prefix in (("$id", ""), ("id", ""), ("$anchor", "#")):
                    if isinstance(node.get(keyword), str):
                        self._named.setdefault(prefix + node[keyword], node)
                open_nodes += node.values()
            elif isinstance(node, list | tuple):
                open_nodes += node

    def target(self, reference: Any, path: str) -> Any:
        """Return what a `$ref` names.

        Raises:
            InvalidRequestError: it is another document, or there is no such place.
        """
        if not isinstance(reference, str):
            raise refuse(path, "must be a text")
        if reference in self._named:
            return self._named[reference]
        if not reference.startswith("#"):
            raise refuse(path, "names another document; only '#...' is supported")
        return self.find(reference, path)

    def find(self, pointer: str, path: str) -> Any:
        """Return the value at a `#/...` pointer; the error names `path`."""
        target = at_pointer(self.root, pointer)
        if target is MISSING or (pointer != "#" and not pointer.startswith("#/")):
            raise refuse(path, f"names {pointer[:200]!r}, which it lacks")
        return target

    def is_only_reference(self, node: Mapping[str, Any]) -> bool:
        """Return True if a `$ref` is all that a schema says."""
        return "$ref" in node and all(name in ("$ref", *_NOTES) for name in node)

    def resolved(self, node: Any) -> Any:
        """Return the schema, or what it names if it is only a reference."""
        for _ in range(64):
            if not isinstance(node, Mapping) or not self.is_only_reference(node):
                break
            for named in self.named_by(node):
                node = named
        return node

    def named_by(self, node: Mapping[str, Any]) -> list[Any]:
        """Return the one schema that a `$ref` in a schema names, or none."""
        if not isinstance(node.get("$ref"), str):
            return []
        try:
            return [self.target(node["$ref"], "#")]
        except InvalidRequestError:
            return []

    def same_value(self, node: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas of one value: a schema, what it refers to, and its combinations."""
        open_nodes, seen = [node], set[int]()
        while open_nodes:
            node = open_nodes.pop(0)
            if isinstance(node, Mapping) and id(node) not in seen:
                seen.add(id(node))
                yield node
                open_nodes += self.named_by(node)
                for keyword in ("allOf", "anyOf", "oneOf"):
                    open_nodes += listed(node, keyword)


def at_pointer(root: Any, pointer: str) -> Any:
    """Return the value at a `#/...` pointer; `MISSING`: there is none."""
    target = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(name, MISSING)
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            return MISSING
    return target


def listed(node: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the list that a schema has for a keyword; empty: it has none."""
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def refuse(path: str, fault: str) -> InvalidRequestError:
    """Return the error about a place of the schema."""
    return InvalidRequestError(f"the JSON schema cannot be used: {path} {fault}")


def quoted(name: Any) -> str:
    """Return a name as part of a path."""
    return str(name)[:64].replace("~", "~0").replace("/", "~1").replace("%", "%25")


def finite(schema: Any, definitions: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a schema and its definitions without references that no finite value can fit."""
    ending: set[str] = set()
    while True:
        more = {name for name in definitions.keys() - ending if _ends(definitions[name], ending)}
        if not more:
            break
        ending |= more
    endless = {f"#/$defs/{name}" for name in definitions.keys() - ending}
    if not endless:
        return schema, definitions
    kept = {name: _without(definitions[name], endless) for name in ending}
    return _without(schema, endless), kept


def _ends(node: Any, ending: set[str]) -> bool:
    """Return True if a finite value may fit a rewritten schema."""
    if isinstance(node, bool):
        return node
    if "$ref" in node and node["$ref"].rsplit("/", 1)[-1] not in ending:
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(_ends(other, ending) for other in node[keyword]):
            return False
    if not all(_ends(part, ending) for part in node.get("allOf", ())):
        return False
    kinds = node.get("type", "any")
    if kinds not in ("object", "array", ["object"], ["array"]):
        return True
    if "object" in kinds:
        properties = node.get("properties", {})
        return all(_ends(properties.get(name, True), ending) for name in node.get("required", ()))
    least = node.get("minItems", 0)
    first = node.get("prefixItems", [])
    needed = first[:least] + ([node.get("items", True)] if least > len(first) else [])
    return all(_ends(part, ending) for part in needed)


def _without(node: Any, endless: set[str]) -> Any:
    if isinstance(node, list):
        return [_without(part, endless) for part in node]
    if not isinstance(node, dict):
        return node
    if node.get("$ref") in endless:
        return False
    return {
        name: value if name in ("const", "enum") else _without(value, endless)
        for name, value in node.items()
    }
