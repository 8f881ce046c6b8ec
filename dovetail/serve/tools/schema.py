"""Tools as OpenAI's requests describe them: the name of each, and the types of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.core.errors import UserError
from dovetail.core.json_schema import resolve

_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array",
}  # fmt: skip


def parameters_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each function's parameters. Without one it takes none, as OpenAI reads it.

    A tool is {"type": "function", "function": {...}}, or the inner object alone, as the Responses route has it.
    """
    found = {}
    for i, tool in enumerate(tools):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(f"tools[{i}]: expected a 'function' with a 'name', got keys {sorted(tool)}")
        found[function["name"]] = function.get("parameters") or {"type": "object", "properties": {}}
    return found


def types_of(parameters: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """The JSON types that a parameter may have; string where the schema does not say."""
    schema = parameters or {}
    declared = schema.get("properties")
    if isinstance(declared, Mapping) and key in declared:
        return _types(declared[key], schema, 8)
    return frozenset({"string"})


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """`depth` ends references that run in a circle."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset({"string"})
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(_TYPES.get(type(value), "string") for value in values)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            return frozenset().union(*(_types(part, root, depth - 1) for part in schema[word]))
    if isinstance(schema.get("properties"), Mapping):
        return frozenset({"object"})
    return frozenset({"array"} if "items" in schema else {"string"})
