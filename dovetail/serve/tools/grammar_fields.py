"""Grammars of arguments that are not written as JSON: one field per declared parameter, in the schema's order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.json_schema import resolve
from dovetail.serve.tools.lark import Lark
from dovetail.serve.tools.schema import types_of

Schema = Mapping[str, Any]
_COUNTED = ("minItems", "maxItems", "uniqueItems", "prefixItems", "contains")
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentRequired")


@dataclass(frozen=True)
class Style:
    before: str  # before a field's value; {key} is its name
    between: str
    value: Callable[[Lark, Schema, Schema], str]  # from the field's schema and the document it is part of


def are_declared(schema: Schema) -> bool:
    """Whether the schema declares every argument."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or any(word in schema for word in _COMBINED):
        return False
    return bool(properties) or not schema.get("additionalProperties")


def write(lark: Lark, style: Style, schema: Schema, root: Schema | None = None) -> str:
    """Optional fields may be left out. `rest`: what may follow a field; `none`: what may come before any field has."""
    root = schema if root is None else root
    between = lark.text(style.between) + " " if style.between else ""
    rest = none = lark.rule('""')
    for key, part in reversed(schema["properties"].items()):
        value = style.value(lark, part if isinstance(part, Mapping) else {}, root)
        field = lark.rule(f"{lark.text(style.before.replace('{key}', key))} {value}")
        if key in schema.get("required", ()):
            rest, none = lark.rule(f"{between}{field} {rest}"), lark.rule(f"{field} {rest}")
        else:
            rest, none = lark.rule(f"({between}{field})? {rest}"), lark.rule(f"{field} {rest} | {none}")
    return none


# --- values in each style ---------------------------------------------------------------------------------------------


def _tag_value(lark: Lark, schema: Schema, root: Schema) -> str:
    """A string as it is, then the newline and the tag that end it; any other value as JSON."""
    end = "\n</parameter>\n"
    if _listed(schema, root):
        values = [value if isinstance(value, str) else json.dumps(value) for value in _listed(schema, root)]
        return lark.one_of([lark.text(value + end) for value in values])
    if "string" in _types(schema, root):
        return lark.until(end)
    return f"{_json(lark, schema, root)} {lark.text(end)}"


def _python_value(lark: Lark, schema: Schema, root: Schema) -> str:
    return '("True" | "False")' if _types(schema, root) == {"boolean"} else _json(lark, schema, root)


def _gemma_value(lark: Lark, schema: Schema, root: Schema) -> str:
    quote = '<|"|>'
    types = _types(schema, root)
    if types == {"string"} and _listed(schema, root):
        return lark.one_of([lark.text(quote + value + quote) for value in _listed(schema, root)])
    if types == {"string"}:
        return f"{lark.text(quote)} {lark.until(quote)}"
    if types == {"object"} and are_declared(schema):
        return f'"{{" {write(lark, GEMMA, schema, root)} "}}"'
    if types == {"array"} and isinstance(schema.get("items"), Mapping) and not any(word in schema for word in _COUNTED):
        item = lark.rule(_gemma_value(lark, schema["items"], root))
        return f'"[" ({item} ("," {item})*)? "]"'
    return _json(lark, schema, root, compact=True)


def _listed(schema: Schema, root: Schema) -> list:
    """The values that it may have, where the schema lists them."""
    schema = resolve(schema, root)
    return schema.get("enum", [schema["const"]] if "const" in schema else [])


def _types(schema: Schema, root: Schema) -> frozenset[str]:
    return types_of({**root, "properties": {"": schema}}, "")


def _json(lark: Lark, schema: Schema, root: Schema, compact: bool = False) -> str:
    definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
    return lark.json({**definitions, **schema}, compact)


TAGS = Style("<parameter={key}>\n", "", _tag_value)
PYTHON = Style("{key}=", ", ", _python_value)
GEMMA = Style("{key}:", ",", _gemma_value)
