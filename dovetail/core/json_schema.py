"""Close JSON schemas: forbid properties that a schema does not list, unless it allows them.

JSON Schema allows every property that `additionalProperties` does not forbid. A request for an object with given
properties means those alone; OpenAI's strict mode and vLLM forbid others too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.core.errors import UserError

DEEPEST = 100  # levels of schemas within schemas
_KEYED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # name -> schema
_LISTED = ("prefixItems", "allOf", "anyOf", "oneOf")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames")
_LISTS = ("properties", "patternProperties")
_SPEAKS = ("additionalProperties", "unevaluatedProperties")
Schema = Mapping[str, Any]


def closed(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` for each object that lists its properties.

    Where several schemas describe one object (`allOf`, or `properties` beside `anyOf` or `$ref`), the properties of all
    of them are listed.
    """
    if not isinstance(schema, Mapping):
        return schema
    closing = _Closing(schema)
    found = closing.close(schema, 0)
    return {**found, "$defs": {**found.get("$defs", {}), **closing.opened}} if closing.opened else found


def resolve(schema: Any, root: Schema) -> Any:
    """Return the target of a reference within the document, or the schema itself if there is none."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return schema if found is None else found


class _Closing:
    def __init__(self, root: Schema):
        self._root = root
        self.opened: dict[str, Any] = {}  # copies of definitions that are open, for references beside other parts
        self._names: dict[str, str] = {}

    def close(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        if len(_sources(schema)) > 1:
            return self._close_joined(schema, depth)
        found = self._within(schema, depth)
        if any(word in schema for word in _LISTS) and not any(word in schema for word in _SPEAKS):
            found["additionalProperties"] = False
        return found

    def _close_joined(self, schema: Schema, depth: int) -> dict[str, Any]:
        """Close an object with several parts by one `allOf` member that lists the properties of all."""
        parts = list(self._parts(schema, ()))
        found = self._open(schema, depth)
        lists = {word: {name: True for part in parts for name in part.get(word, ())} for word in _LISTS}
        if any(lists.values()) and not any(word in part for part in parts for word in _SPEAKS):
            listed = {word: names for word, names in lists.items() if names}
            found["allOf"] = [*found.get("allOf", ()), {**listed, "additionalProperties": False}]
        return found

    def _open(self, schema: Any, depth: int) -> Any:
        """Return the schema with closed inner schemas, itself and its references left open."""
        if not isinstance(schema, Mapping):
            return schema
        found = self._within(schema, depth)
        for word in ("allOf", "anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                found[word] = [self._open(part, depth + 1) for part in schema[word]]
        target = resolve(schema, self._root)
        if target is not schema:
            found["$ref"] = f"#/$defs/{self._opened_name(schema['$ref'], target, depth)}"
        return found

    def _opened_name(self, reference: str, target: Any, depth: int) -> str:
        if reference not in self._names:
            name = self._names[reference] = f"dovetail-open-{len(self._names)}"  # first: it may refer to itself
            self.opened[name] = self._open(target, depth + 1)
        return self._names[reference]

    def _parts(self, schema: Any, seen: tuple[int, ...]) -> Iterator[Schema]:
        """Yield this schema and the schemas that describe the same value."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return
        yield schema
        seen = (*seen, id(schema))
        for word in ("allOf", "anyOf", "oneOf"):
            for part in schema[word] if isinstance(schema.get(word), list) else ():
                yield from self._parts(part, seen)
        yield from self._parts(resolve(schema, self._root), seen)

    def _within(self, schema: Schema, depth: int) -> dict[str, Any]:
        """Return a copy with closed inner schemas; those of `not` stay open, since closed they would exclude less."""
        if depth > DEEPEST:
            raise UserError(f"a JSON schema may be nested {DEEPEST} levels deep; this one is deeper")
        found = dict(schema)
        for word in _KEYED:
            if isinstance(schema.get(word), Mapping):
                found[word] = {name: self.close(part, depth + 1) for name, part in schema[word].items()}
        for word in _LISTED:
            if isinstance(schema.get(word), list):
                found[word] = [self.close(part, depth + 1) for part in schema[word]]
        for word in _SINGLE:
            if word in schema:
                found[word] = self.close(schema[word], depth + 1)
        return found


def _sources(schema: Schema) -> list[str]:
    """Return the keywords that describe the value's properties: its own lists, a reference, each part of `allOf`."""
    own = ["own"] if any(word in schema for word in _LISTS) else []
    parts = ["allOf"] * len(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
    return own + parts + [word for word in ("$ref", "anyOf", "oneOf") if word in schema]
