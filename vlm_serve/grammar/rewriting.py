"""Rewrites JSON schemas of all drafts to the keywords that llguidance enforces.

The result may accept less than the schema, never more: objects are closed unless they are maps, and
alternatives of `oneOf` are told apart. A schema that cannot be rewritten is refused with the path
of its keyword.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vlm_serve.grammar.forms import (
    ENFORCED,
    FORMATS,
    KNOWN,
    PLAIN,
    UNENFORCED,
    bounds,
    length_pattern,
    lengths,
    negated,
    pattern,
    property_names,
)
from vlm_serve.grammar.kinds import allowed, own_kinds
from vlm_serve.grammar.references import Document, finite, listed, quoted, refuse

MAX_SCHEMA_NODES = 4096
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")


class Rewriter:
    """Rewrites one document.

    Args:
        root: the whole schema.
        strict: refuse unknown keywords.

    Raises:
        InvalidRequestError: from `schema`; the message names the path.
    """

    def __init__(self, root: Any, *, strict: bool = False) -> None:
        self._document = Document(root)
        self._strict = strict
        self._definitions: dict[str, Any] = {}
        self._names: dict[tuple[int, bool, str], str] = {}
        self._count = 0

    def schema(self, pointer: str = "#") -> dict[str, Any] | bool:
        """Return the rewritten schema at a place of the document."""
        rewritten = self._node(self._document.find(pointer, "#"), pointer, closed=True)
        rewritten, definitions = finite(rewritten, self._definitions)
        if isinstance(rewritten, bool):
            return rewritten
        return {**({"$defs": definitions} if definitions else {}), **rewritten}

    def _node(self, node: Any, path: str, *, closed: bool, needed: str = "") -> Any:
        """Rewrite a subschema.

        Args:
            closed: nothing else restricts the same value, so its objects can be closed.
            needed: a property required as well.
        """
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise refuse(path, "must be an object or a boolean")
        self._count += 1
        if self._count > MAX_SCHEMA_NODES:
            raise refuse(
                "#", f"has more than {MAX_SCHEMA_NODES} subschemas with those of its $refs"
            )
        self._check(node, path)
        given = {
            name: value
            for name, value in node.items()
            if name in ENFORCED and (value is not None or name == "const")
        }
        bounds(given)
        lengths(given, path)
        out: dict[str, Any] = {name: given[name] for name in PLAIN if name in given}
        parts: list[Any] = []
        self._texts(given, out, parts, path)
        self._list(given, out, path)
        self._object(given, out, parts, path)
        if needed:
            out["required"] = list(dict.fromkeys([*out.get("required", ()), needed]))
        if "not" in given:
            parts.append(negated(given["not"], f"{path}/not"))
        combined = any(name in given for name in _COMBINED)
        alone = closed and not parts and all(name in _COMBINED for name in given)
        alone = alone and len(given) == 1 and not needed
        self._combinations(given, parts, path, closed=alone)
        if given.get("unevaluatedProperties", True) is not True:
            if combined:
                fault = "cannot be enforced beside a combination"
                raise refuse(f"{path}/unevaluatedProperties", fault)
            out.setdefault("additionalProperties", False)
        elif closed and not alone and (combined or given.keys() & {"properties", "required"}):
            self._close(node, out, combined)
        if parts:
            out["allOf"] = parts
        if alone and len(parts) == 1:
            return parts[0]
        return False if any(part is False for part in parts) else out

    def _check(self, node: Mapping[str, Any], path: str) -> None:
        for keyword, value in node.items():
            where = f"{path}/{quoted(keyword)}"
            if keyword in UNENFORCED and value is not None and value is not False:
                if keyword == "uniqueItems" and node.get("maxItems") in (0, 1):
                    continue
                raise refuse(where, "is a keyword that cannot be enforced")
            if self._strict and keyword not in KNOWN:
                raise refuse(where, f"is the unknown keyword {str(keyword)[:64]!r}")
        required = node.get("required")
        if isinstance(required, bool):
            raise refuse(f"{path}/required", "is draft 3's boolean; it must be a list of names")
        if required is not None and not _texts(required):
            raise refuse(f"{path}/required", "must be a list of names")

    def _texts(
        self, given: dict[str, Any], out: dict[str, Any], parts: list[Any], path: str
    ) -> None:
        if "pattern" in given:
            out["pattern"] = pattern(given["pattern"], f"{path}/pattern")
        form = given.get("format")
        if isinstance(form, str) and form in FORMATS:
            if "pattern" in out:
                parts.append({"pattern": FORMATS[form]})
            else:
                out["pattern"] = FORMATS[form]
        size = length_pattern(given, out["pattern"]) if "pattern" in out else None
        if size is not None:
            parts.append({"pattern": size})
            out.pop("minLength", None)
            out.pop("maxLength", None)

    def _list(self, given: dict[str, Any], out: dict[str, Any], path: str) -> None:
        items, first = given.get("items"), given.get("prefixItems")
        rest_path = f"{path}/items"
        if isinstance(items, list):  # drafts up to 2019-09
            first, items = items, given.get("additionalItems")
            first_path, rest_path = f"{path}/items", f"{path}/additionalItems"
        else:
            first_path = f"{path}/prefixItems"
        if items is None and given.get("unevaluatedItems") is False:
            if any(name in given for name in _COMBINED):
                raise refuse(f"{path}/unevaluatedItems", "cannot be enforced beside a combination")
            items = False
        if first:
            if not isinstance(first, list):
                raise refuse(first_path, "must be a list of schemas")
            out["prefixItems"] = [
                self._node(part, f"{first_path}/{index}", closed=True)
                for index, part in enumerate(first)
            ]
            least = given.get("minItems", 0)
            if items is None and isinstance(least, int) and least <= len(first):
                items = False
        if items is not None:
            out["items"] = self._node(items, rest_path, closed=True)

    def _object(
        self, given: dict[str, Any], out: dict[str, Any], parts: list[Any], path: str
    ) -> None:
        given.update(property_names(given, path))
        for keyword in ("properties", "patternProperties"):
            if keyword in given:
                if not isinstance(given[keyword], Mapping):
                    raise refuse(f"{path}/{keyword}", "must be an object of schemas")
                out[keyword] = {
                    pattern(name, f"{path}/{keyword}") if keyword != "properties" else name:
                    self._node(part, f"{path}/{keyword}/{quoted(name)}", closed=True)
                    for name, part in given[keyword].items() if part is not None
                }  # fmt: skip
        if "additionalProperties" in given:
            out["additionalProperties"] = self._node(
                given["additionalProperties"], f"{path}/additionalProperties", closed=True
            )
        if given.get("required"):
            out["required"] = list(dict.fromkeys(given["required"]))
        least = given.get("minProperties", 0)
        if isinstance(least, int) and least > max(1, len(out.get("required", ()))):
            raise refuse(
                f"{path}/minProperties", "cannot be enforced above 1 and the required properties"
            )
        if isinstance(least, int) and least > len(out.get("required", ())):
            out["minProperties"] = least
        for name, names in {
            **_mapping(given.get("dependencies")), **_mapping(given.get("dependentRequired"))
        }.items():  # fmt: skip
            if not _texts(names):
                raise refuse(f"{path}/dependencies", "cannot be enforced with schemas")
            without, both = {"properties": {name: False}}, {"required": [name, *names]}
            parts.append({"anyOf": [without, both]})

    def _combinations(
        self, given: Mapping[str, Any], parts: list[Any], path: str, *, closed: bool
    ) -> None:
        if "$ref" in given:
            parts.append(self._reference(given["$ref"], f"{path}/$ref", closed=closed))
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword not in given:
                continue
            branches, where = given[keyword], f"{path}/{keyword}"
            if not isinstance(branches, list) or not branches:
                raise refuse(where, "must be a list of schemas that is not empty")
            kept = closed and (keyword != "allOf" or len(branches) == 1)
            if keyword == "oneOf" and len(branches) > 1:
                parts.append(self._one_of(branches, where, closed=kept))
                continue
            nodes = [
                self._node(branch, f"{where}/{index}", closed=kept)
                for index, branch in enumerate(branches)
            ]
            parts += nodes if keyword == "allOf" else [_any(nodes)]

    def _one_of(self, branches: list[Any], path: str, *, closed: bool) -> Any:
        """Rewrite alternatives so that a value fits only one of them."""
        whole = [self._document.resolved(branch) for branch in branches]
        name = discriminator(whole, self._document)
        # A property that tells them apart is required, so none may forbid it as well.
        forbidden = exclusive(whole, self._document) if name is None else None
        sure = name is not None or forbidden is not None
        nodes = []
        for index, branch in enumerate(branches):
            where = f"{path}/{index}"
            if name:
                node = self._needing(branch, where, name, closed=closed)
            else:
                node = self._node(branch, where, closed=closed and sure)
            if forbidden is not None and forbidden[index]:
                node = {"allOf": [node, {"properties": dict.fromkeys(forbidden[index], False)}]}
            nodes.append(node)
        return _any(nodes) if sure else {"oneOf": nodes}

    def _needing(self, branch: Any, path: str, name: str, *, closed: bool) -> Any:
        """Rewrite a branch that requires the property by which it is told apart."""
        if isinstance(branch, Mapping) and self._document.is_only_reference(branch):
            where = f"{path}/$ref"
            return self._reference(branch["$ref"], where, closed=closed, needed=name)
        return self._node(branch, path, closed=closed, needed=name)

    def _reference(self, reference: Any, path: str, *, closed: bool, needed: str = "") -> Any:
        target = self._document.target(reference, path)
        key = (id(target), closed, needed)
        if key not in self._names:
            name = self._names[key] = f"d{len(self._names)}"
            pointer = reference if reference.startswith("#") else f"#({reference})"
            node = self._node(target, pointer, closed=closed, needed=needed)
            self._definitions[name] = node
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _close(self, node: Any, out: dict[str, Any], combined: bool) -> None:
        """Allow an object only the properties that the schema names, unless it is a map."""
        names, is_map = _names_of(node, self._document)
        if is_map or "additionalProperties" in out or "patternProperties" in out:
            return
        if not names and combined:
            return
        known = out.get("properties", {})
        out["properties"] = {**known, **{name: True for name in names if name not in known}}
        out["additionalProperties"] = False


def rewrite(schema: Any, *, strict: bool = False, pointer: str = "#") -> Any:
    """Return the schema in llguidance's keywords.

    Raises:
        InvalidRequestError: it cannot be enforced. The message names the path.
    """
    return Rewriter(schema, strict=strict).schema(pointer)


def children(schema: Any, pointer: str) -> Iterator[str]:
    """Yield the places of the subschemas of a place."""
    node = Document(schema).find(pointer, pointer)
    if not isinstance(node, Mapping):
        return
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        for name in _mapping(node.get(keyword)):
            yield f"{pointer}/{keyword}/{quoted(name)}"
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        for index in range(len(listed(node, keyword))):
            yield f"{pointer}/{keyword}/{index}"
    for keyword in ("items", "additionalProperties"):
        if isinstance(node.get(keyword), Mapping):
            yield f"{pointer}/{keyword}"


def _any(nodes: list[Any]) -> Any:
    """Return the union of alternatives without those that nothing fits."""
    left = [node for node in nodes if node is not False]
    return {"anyOf": left} if left else False


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def discriminator(branches: list[Any], document: Document) -> str | None:
    """Return a property whose values tell all branches apart; "": their types do; None: neither."""
    kinds = [_kinds(branch) for branch in branches]
    if sum(map(len, kinds)) == len(frozenset().union(*kinds)):
        return ""
    if any(branch_kinds != {"object"} for branch_kinds in kinds):
        return None
    for name in _properties(branches[0]):
        values = [_values(document.resolved(_properties(branch).get(name))) for branch in branches]
        if None not in values:
            all_values = [value for branch_values in values for value in branch_values or ()]
            if len(all_values) == len(set(all_values)):
                return name
    return None


def exclusive(branches: list[Any], document: Document) -> list[list[str]] | None:
    """Return the names that each branch must lack so that only one fits; None: there are none."""
    needed: list[set[str]] = []
    for branch in branches:
        if not isinstance(branch, Mapping) or not isinstance(branch.get("required"), list):
            return None
        needed.append({name for name in branch["required"] if isinstance(name, str)})
    if _kinds(branches[0]) != {"object"} and any("type" in branch for branch in branches):
        return None
    everything = set().union(*needed)
    for index, names in enumerate(needed):
        if any(not other - names for at, other in enumerate(needed) if at != index):
            return None
    return [sorted(everything - names) for names in needed]


def _names_of(whole: Any, document: Document) -> tuple[list[str], bool]:
    """Return the properties that a schema and its combinations name, and whether it is a map."""
    names: dict[str, None] = {}
    is_map = False
    for node in document.same_value(whole):
        names |= dict.fromkeys(_properties(node))
        names |= dict.fromkeys(name for name in node.get("required") or () if isinstance(name, str))
        is_map |= any(
            node.get(keyword) not in (None, False)
            for keyword in ("additionalProperties", "patternProperties", "propertyNames")
        )
        for keyword in ("dependentRequired", "dependencies"):
            dependencies = _mapping(node.get(keyword))
            for name in dependencies:
                names |= dict.fromkeys([name, *listed(dependencies, name)])
    return list(names), is_map


def _kinds(node: Any) -> frozenset[str]:
    """Return the types of the values that a schema may accept, integers as numbers."""
    return frozenset("number" if kind == "integer" else kind for kind in own_kinds(node))


def _properties(node: Any) -> Mapping[str, Any]:
    return _mapping(_mapping(node).get("properties"))


def _values(node: Any) -> list[str] | None:
    """Return the texts of the only values that a schema accepts; None: there are others."""
    values = allowed(node) if isinstance(node, Mapping) else None
    if values is None or any(isinstance(value, int | float | list | dict) for value in values):
        return None  # 1 equals 1.0
    return [json.dumps(value) for value in dict.fromkeys(values)]
