"""Describe tools as OpenAI's requests do: names and parameter types; and as text, for a template without tools.

The text is that of Hermes's template, which most models have seen; their calls are then read in Hermes's format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.core.errors import RequestError
from dovetail.core.json_schema import resolve

_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array",
}  # fmt: skip


def parameters_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each function's parameters; a function without one takes none, as in OpenAI's API.

    A tool is {"type": "function", "function": {...}}, or the inner object alone, as in the Responses route.
    """
    found = {}
    for i, tool in enumerate(tools):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{i}] must be a function with a name, got keys {sorted(tool)}", param="tools")
        found[function["name"]] = function.get("parameters") or {"type": "object", "properties": {}}
    return found


def types_of(parameters: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; string if the schema does not say."""
    schema = parameters or {}
    declared = schema.get("properties")
    if isinstance(declared, Mapping) and key in declared:
        return _types(declared[key], schema, 8)
    return frozenset({"string"})


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Return the types of a schema; `depth` ends circular references."""
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


_BEFORE = (
    "You may call functions to assist with the user's query. Their signatures are within <tools></tools>:\n<tools>\n"
)
_AFTER = (
    "\n</tools>\n\nFor each function call, return a JSON object with the function's name and arguments within "
    '<tool_call></tool_call>:\n<tool_call>\n{"name": <function name>, "arguments": <JSON object>}\n</tool_call>'
)


def spell(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the tools described in the system message and earlier calls as text."""
    spelled = [_with_calls_as_text(message) for message in messages]
    if not tools:
        return spelled
    described = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _AFTER
    if spelled[0]["role"] == "system":
        spelled[0]["content"] = f"{spelled[0]['content']}\n\n{described}"
        return spelled
    return [{"role": "system", "content": described}, *spelled]


def _with_calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [
        f"<tool_call>\n{json.dumps(dict(call['function']), ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    if calls:
        plain["content"] = "\n".join([*([plain["content"]] if plain.get("content") else []), *calls])
    return plain
