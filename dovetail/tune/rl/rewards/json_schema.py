"""Whether a value fits a JSON schema, and a reward that is 1 where a completion's JSON does.

What a schema may say here is listed in CHECKS and IGNORED; anything else is refused, since a keyword that was passed
over would reward what the schema forbids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from dovetail.core.choice import did_you_mean, require
from dovetail.core.errors import UserError
from dovetail.tune.rl.rewards.scored import NoReward
from dovetail.tune.rl.rewards.text import block_of, text_of

TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "number": lambda v: _is_number(v),
    "integer": lambda v: _is_number(v) and (isinstance(v, int) or v.is_integer()),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}
IGNORED = {
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "format",
    "deprecated", "readOnly", "writeOnly", "then", "else",
}  # fmt: skip


@dataclass(frozen=True)
class Json:
    """The completion, or its last fenced block, is JSON that fits the schema: a mapping, a file of one, or a column of
    them. Without a schema, any JSON will do.
    """

    schema: Any = None
    column: str = ""

    def __post_init__(self) -> None:
        require(not (self.schema and self.column), "schema and column are two places for a schema; give one of them")
        if isinstance(self.schema, str | Path):
            object.__setattr__(self, "schema", json.loads(Path(self.schema).read_text()))
        if self.schema is not None:
            check_schema(self.schema)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if self.column else ()

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float | NoReward | None]:
        schemas = columns[self.column] if self.column else [self.schema] * len(completions)
        return [self._one(text_of(c), schema) for c, schema in zip(completions, schemas, strict=True)]

    def _one(self, text: str, schema: Any) -> float | NoReward | None:
        if self.column:
            if schema is None:
                return None
            try:
                schema = json.loads(schema) if isinstance(schema, str) else schema
                check_schema(schema)
            except ValueError as error:  # one bad row does not cost the others
                return NoReward("schema", str(error))
        try:
            value = json.loads(block_of(text, "json"), parse_constant=_refuse)
            return float(schema is None or fits(value, schema))
        except (ValueError, RecursionError):  # no JSON, or nested past all use
            return 0.0


def _refuse(constant: str) -> None:
    raise UserError(f"{constant} is not JSON")


# --- the schema ---------------------------------------------------------------------------------------------------


def fits(value: Any, schema: Any, root: Any = None) -> bool:
    """The schema has been checked. `root` is where its references begin."""
    if isinstance(schema, bool):
        return schema
    root = schema if root is None else root
    return all(
        CHECKS[word](value, said, schema, lambda v, s: fits(v, s, root), root)
        for word, said in schema.items()
        if word in CHECKS
    )


def check_schema(schema: Any, root: Any = None) -> None:
    """ValueError where it says something that is not checked here."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise UserError(f"a JSON schema must be a mapping such as {{'type': 'object'}}; got {schema!r}")
    root = schema if root is None else root
    for word, said in schema.items():
        if word not in CHECKS and word not in IGNORED:
            raise UserError(
                f"the JSON schema says {word!r}, which is not checked here; leave it out.{did_you_mean(word, CHECKS)}"
            )
        if word == "type" and (unknown := set(_list(said)) - set(TYPES)):
            raise UserError(
                f"the JSON schema's types must be of {', '.join(TYPES)}; got {', '.join(map(str, unknown))}"
            )
        if word == "$ref":
            _resolve(said, root)
        for inner in _inner(word, said):
            check_schema(inner, root)


def _inner(word: str, said: Any) -> list[Any]:
    """The schemas within one of its keywords."""
    if word in ("properties", "patternProperties", "$defs", "definitions"):
        return list(said.values())
    if word in ("anyOf", "oneOf", "allOf", "prefixItems"):
        return list(said)
    if word in ("additionalProperties", "items", "contains", "not", "propertyNames", "if", "then", "else"):
        return [said]
    return []


def _resolve(reference: str, root: Any) -> Any:
    if reference == "#":
        return root
    found = root
    for part in reference.removeprefix("#/").split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if not reference.startswith("#/") or not isinstance(found, Mapping) or part not in found:
            raise UserError(f"the JSON schema's $ref must be a place in it, such as #/$defs/name; got {reference!r}")
        found = found[part]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(said: Any) -> list:
    return said if isinstance(said, list) else [said]


def _same(a: Any, b: Any) -> bool:
    """As JSON has it: 1 is 1.0, and true is not 1."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _of(kind: type | tuple[type, ...], holds: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    """A keyword that says something of values of one kind, and nothing of others."""
    return lambda value, said, *_: not isinstance(value, kind) or isinstance(value, bool) or holds(value, said)


def _properties(value: Any, said: Any, schema: Any, fit: Any, root: Any) -> bool:
    return not isinstance(value, dict) or all(fit(value[k], s) for k, s in said.items() if k in value)


def _pattern_properties(value: Any, said: Any, schema: Any, fit: Any, root: Any) -> bool:
    if not isinstance(value, dict):
        return True
    return all(fit(v, s) for k, v in value.items() for pattern, s in said.items() if re.search(pattern, k))


def _additional(value: Any, said: Any, schema: Any, fit: Any, root: Any) -> bool:
    if not isinstance(value, dict):
        return True
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    others = [v for k, v in value.items() if k not in named and not any(re.search(p, k) for p in patterns)]
    return all(fit(v, said) for v in others)


def _items(value: Any, said: Any, schema: Any, fit: Any, root: Any) -> bool:
    return not isinstance(value, list) or all(fit(v, said) for v in value[len(schema.get("prefixItems", ())) :])


def _prefix_items(value: Any, said: Any, schema: Any, fit: Any, root: Any) -> bool:
    return not isinstance(value, list) or all(map(fit, value, said))


def _contains(value: Any, said: Any, schema: Any, fit: Any, root: Any) -> bool:
    return not isinstance(value, list) or any(fit(v, said) for v in value)


def _property_names(value: Any, said: Any, schema: Any, fit: Any, root: Any) -> bool:
    return not isinstance(value, dict) or all(fit(k, said) for k in value)


def _unique(value: list, said: bool) -> bool:
    return not said or not any(_same(a, b) for i, a in enumerate(value) for b in value[:i])


def _multiple(value: float, said: float) -> bool:
    """As written: 0.3 is three times 0.1."""
    return Fraction(str(value)) % Fraction(str(said)) == 0


def _conditional(value: Any, said: Any, schema: Any, fit: Any, root: Any) -> bool:
    return fit(value, schema.get("then" if fit(value, said) else "else", True))


NUMBERS = (int, float)
CHECKS: dict[str, Callable[..., bool]] = {
    "type": lambda v, said, *_: any(TYPES[t](v) for t in _list(said)),
    "enum": lambda v, said, *_: any(_same(v, one) for one in said),
    "const": lambda v, said, *_: _same(v, said),
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "propertyNames": _property_names,
    "required": _of(dict, lambda v, said: all(k in v for k in said)),
    "minProperties": _of(dict, lambda v, said: len(v) >= said),
    "maxProperties": _of(dict, lambda v, said: len(v) <= said),
    "items": _items,
    "prefixItems": _prefix_items,
    "contains": _contains,
    "minItems": _of(list, lambda v, said: len(v) >= said),
    "maxItems": _of(list, lambda v, said: len(v) <= said),
    "uniqueItems": _of(list, _unique),
    "minLength": _of(str, lambda v, said: len(v) >= said),
    "maxLength": _of(str, lambda v, said: len(v) <= said),
    "pattern": _of(str, lambda v, said: re.search(said, v) is not None),
    "minimum": _of(NUMBERS, lambda v, said: v >= said),
    "maximum": _of(NUMBERS, lambda v, said: v <= said),
    "exclusiveMinimum": _of(NUMBERS, lambda v, said: v > said),
    "exclusiveMaximum": _of(NUMBERS, lambda v, said: v < said),
    "multipleOf": _of(NUMBERS, _multiple),
    "allOf": lambda v, said, schema, fit, root: all(fit(v, s) for s in said),
    "anyOf": lambda v, said, schema, fit, root: any(fit(v, s) for s in said),
    "oneOf": lambda v, said, schema, fit, root: sum(fit(v, s) for s in said) == 1,
    "not": lambda v, said, schema, fit, root: not fit(v, said),
    "if": _conditional,
    "$ref": lambda v, said, schema, fit, root: fit(v, _resolve(said, root)),
}
