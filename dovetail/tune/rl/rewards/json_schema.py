"""Validate values against a JSON schema, and reward completions whose JSON is valid.

The supported keywords are CHECKS and IGNORED. Any other keyword is refused: a keyword that is not checked would reward
completions that the schema forbids.
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
from dovetail.core.errors import RecipeError
from dovetail.tune.rl.rewards.completion import NoReward, block_of, text_of

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
class JsonReward:
    """Give 1 if the completion, or its last fenced block, is JSON that is valid against the schema.

    Attributes:
        schema: A mapping, or the path of a JSON file; None: any JSON is valid.
        column: The column that holds a schema for each row, in place of `schema`.
    """

    schema: Any = None
    column: str = ""

    def __post_init__(self) -> None:
        require(
            not (self.schema and self.column), "schema and column are two places for a schema: set one", param="schema"
        )
        if isinstance(self.schema, str | Path):
            object.__setattr__(self, "schema", _read_schema(Path(self.schema)))
        if self.schema is not None:
            check_schema(self.schema)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return (self.column,) if self.column else ()

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float | NoReward | None]:
        """Return the reward of each completion."""
        schemas = columns[self.column] if self.column else [self.schema] * len(completions)
        return [self._score(text_of(c), schema) for c, schema in zip(completions, schemas, strict=True)]

    def _score(self, text: str, schema: Any) -> float | NoReward | None:
        if self.column:
            if schema is None:
                return None
            try:
                schema = json.loads(schema) if isinstance(schema, str) else schema
                check_schema(schema)
            except ValueError as error:  # the other rows keep their rewards
                return NoReward("schema", str(error))
        try:
            value = json.loads(block_of(text, "json"), parse_constant=_refuse_constant)
            return float(schema is None or fits(value, schema))
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return 0.0


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _read_schema(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(f"schema must be a mapping or a JSON file; {path} is not: {error}", param="schema") from None


# --- the schema -------------------------------------------------------------------------------------------------------


def fits(value: Any, schema: Any, root: Any = None) -> bool:
    """Return whether a value is valid against a schema that `check_schema` accepts; `root`: for its references."""
    if isinstance(schema, bool):
        return schema
    root = schema if root is None else root
    return all(
        CHECKS[word](value, operand, schema, lambda v, s: fits(v, s, root), root)
        for word, operand in schema.items()
        if word in CHECKS
    )


def check_schema(schema: Any, root: Any = None) -> None:
    """Raise a RecipeError for a schema that uses an unknown keyword or type."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise RecipeError(
            f"a JSON schema must be a mapping such as {{'type': 'object'}}; got {schema!r}", param="schema"
        )
    root = schema if root is None else root
    for word, operand in schema.items():
        if word not in CHECKS and word not in IGNORED:
            raise RecipeError(
                f"the JSON schema has {word!r}, which is not supported: leave it out.{did_you_mean(word, CHECKS)}",
                param="schema",
            )
        if word == "type" and (unknown := set(_list(operand)) - set(TYPES)):
            raise RecipeError(
                f"the JSON schema's types must be of {', '.join(TYPES)}; got {', '.join(map(str, unknown))}",
                param="schema",
            )
        if word == "$ref":
            _resolve(operand, root)
        for inner in _inner(word, operand):
            check_schema(inner, root)


def _inner(word: str, operand: Any) -> list[Any]:
    """Return the schemas within a keyword."""
    if word in ("properties", "patternProperties", "$defs", "definitions"):
        return list(operand.values())
    if word in ("anyOf", "oneOf", "allOf", "prefixItems"):
        return list(operand)
    if word in ("additionalProperties", "items", "contains", "not", "propertyNames", "if", "then", "else"):
        return [operand]
    return []


def _resolve(reference: str, root: Any) -> Any:
    if reference == "#":
        return root
    found = root
    for part in reference.removeprefix("#/").split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if not reference.startswith("#/") or not isinstance(found, Mapping) or part not in found:
            raise RecipeError(
                f"the JSON schema's $ref must point into it, such as #/$defs/name; got {reference!r}", param="schema"
            )
        found = found[part]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list(operand: Any) -> list:
    return operand if isinstance(operand, list) else [operand]


def _same(a: Any, b: Any) -> bool:
    """Compare as JSON: 1 equals 1.0, and true does not equal 1."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _of(kind: type | tuple[type, ...], holds: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    """Return the check of a keyword that applies to values of one type only."""
    return lambda value, operand, *_: not isinstance(value, kind) or isinstance(value, bool) or holds(value, operand)


def _properties(value: Any, operand: Any, schema: Any, fit: Any, root: Any) -> bool:
    return not isinstance(value, dict) or all(fit(value[k], s) for k, s in operand.items() if k in value)


def _pattern_properties(value: Any, operand: Any, schema: Any, fit: Any, root: Any) -> bool:
    if not isinstance(value, dict):
        return True
    return all(fit(v, s) for k, v in value.items() for pattern, s in operand.items() if re.search(pattern, k))


def _additional(value: Any, operand: Any, schema: Any, fit: Any, root: Any) -> bool:
    if not isinstance(value, dict):
        return True
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    others = [v for k, v in value.items() if k not in named and not any(re.search(p, k) for p in patterns)]
    return all(fit(v, operand) for v in others)


def _items(value: Any, operand: Any, schema: Any, fit: Any, root: Any) -> bool:
    return not isinstance(value, list) or all(fit(v, operand) for v in value[len(schema.get("prefixItems", ())) :])


def _prefix_items(value: Any, operand: Any, schema: Any, fit: Any, root: Any) -> bool:
    return not isinstance(value, list) or all(map(fit, value, operand))


def _contains(value: Any, operand: Any, schema: Any, fit: Any, root: Any) -> bool:
    return not isinstance(value, list) or any(fit(v, operand) for v in value)


def _property_names(value: Any, operand: Any, schema: Any, fit: Any, root: Any) -> bool:
    return not isinstance(value, dict) or all(fit(k, operand) for k in value)


def _unique(value: list, operand: bool) -> bool:
    return not operand or not any(_same(a, b) for i, a in enumerate(value) for b in value[:i])


def _multiple(value: float, operand: float) -> bool:
    """Compare in decimal: 0.3 is a multiple of 0.1."""
    return Fraction(str(value)) % Fraction(str(operand)) == 0


def _conditional(value: Any, operand: Any, schema: Any, fit: Any, root: Any) -> bool:
    return fit(value, schema.get("then" if fit(value, operand) else "else", True))


NUMBERS = (int, float)
CHECKS: dict[str, Callable[..., bool]] = {
    "type": lambda v, operand, *_: any(TYPES[t](v) for t in _list(operand)),
    "enum": lambda v, operand, *_: any(_same(v, one) for one in operand),
    "const": lambda v, operand, *_: _same(v, operand),
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "propertyNames": _property_names,
    "required": _of(dict, lambda v, operand: all(k in v for k in operand)),
    "minProperties": _of(dict, lambda v, operand: len(v) >= operand),
    "maxProperties": _of(dict, lambda v, operand: len(v) <= operand),
    "items": _items,
    "prefixItems": _prefix_items,
    "contains": _contains,
    "minItems": _of(list, lambda v, operand: len(v) >= operand),
    "maxItems": _of(list, lambda v, operand: len(v) <= operand),
    "uniqueItems": _of(list, _unique),
    "minLength": _of(str, lambda v, operand: len(v) >= operand),
    "maxLength": _of(str, lambda v, operand: len(v) <= operand),
    "pattern": _of(str, lambda v, operand: re.search(operand, v) is not None),
    "minimum": _of(NUMBERS, lambda v, operand: v >= operand),
    "maximum": _of(NUMBERS, lambda v, operand: v <= operand),
    "exclusiveMinimum": _of(NUMBERS, lambda v, operand: v > operand),
    "exclusiveMaximum": _of(NUMBERS, lambda v, operand: v < operand),
    "multipleOf": _of(NUMBERS, _multiple),
    "allOf": lambda v, operand, schema, fit, root: all(fit(v, s) for s in operand),
    "anyOf": lambda v, operand, schema, fit, root: any(fit(v, s) for s in operand),
    "oneOf": lambda v, operand, schema, fit, root: sum(fit(v, s) for s in operand) == 1,
    "not": lambda v, operand, schema, fit, root: not fit(v, operand),
    "if": _conditional,
    "$ref": lambda v, operand, schema, fit, root: fit(v, _resolve(operand, root)),
}
