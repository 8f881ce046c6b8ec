"""A function's description for a model, in OpenAI's shape: from its type hints and its docstring."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dovetail.core.errors import UserError

_PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_KINDS = {list: "array", dict: "object"}
P = inspect.Parameter


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    name = getattr(function, "__name__", "")
    if not callable(function) or not name.isidentifier():
        raise UserError(f"a tool must be a function with a name of its own, not a lambda; got {function!r}")
    hints, docs = _hints(function, name), inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters
    properties = {key: _property(each, hints, docs, name) for key, each in parameters.items()}
    required = [key for key, each in parameters.items() if each.default is P.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    described = {"description": _said_first(docs)} if docs else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(
            f"the tool {name} has a type hint that is not known where it is defined ({error}); import it there"
        ) from None


def _property(parameter: P, hints: dict[str, Any], docs: str, tool: str) -> dict[str, Any]:
    if parameter.kind not in (P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY):
        raise UserError(
            f"a tool's parameters are given by name; the tool {tool} has {parameter}: give each a name of its own"
        )
    if parameter.name not in hints:
        raise UserError(f"the tool {tool} must have a type hint for each parameter; {parameter.name} has none")
    schema = _schema(hints[parameter.name], f"{parameter.name} of the tool {tool}")
    if said := _said_of(parameter.name, docs):
        schema["description"] = said
    if parameter.default is not P.empty and isinstance(parameter.default, str | int | float | bool | None):
        schema["default"] = parameter.default
    return schema


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """JSON schema of a type."""
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        said = [each for each in inner[1:] if isinstance(each, str)]
        return {**_schema(inner[0], where), **({"description": said[0]} if said else {})}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each, where) for each in inner]}
    if origin in _KINDS:
        return _nested(origin, inner, where)
    raise UserError(
        f"{where} must be str, int, float, bool, None, Literal, list, dict, or a union of these, which JSON can "
        f"say; its type is {hint}"
    )


def _nested(origin: Any, inner: tuple, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {"type": _KINDS[origin]}
    if origin is list and inner:
        found["items"] = _schema(inner[0], where)
    elif origin is dict and inner:
        found["additionalProperties"] = _schema(inner[1], where)
    return found


# --- the docstring ----------------------------------------------------------------------------------------------------


def _said_first(docs: str) -> str:
    """Its first paragraph, on one line."""
    return " ".join(docs.split("\n\n")[0].split())


def _said_of(name: str, docs: str) -> str:
    """After `name:`, `name (type):` or `:param name:` at the beginning of a line."""
    found = re.search(rf"^\s*(?::param\s+)?{re.escape(name)}\s*(?:\([^)]*\))?:[ \t]*(.+)$", docs, re.MULTILINE)
    return found[1].strip() if found else ""
